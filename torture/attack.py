"""Attacks: real commands on what strangers made, and several commands at once.

A campaign yields a `Case` for each attack. A command must refuse in one line, or do its work as
without the attack; anything else is a complaint of the case.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.table import Table

from torture import (
    attack_data,
    attack_pictures,
    attack_runs,
    attack_server,
    attack_taught,
    attack_together,
)
from torture.measured import Case

Campaign = Callable[[Path, int], Iterator[Case]]
"""Called with an empty folder to work in and a seed."""

ATTACKS: dict[str, Campaign] = {
    "runs of strangers": attack_runs.campaign,
    "data of strangers": attack_data.campaign,
    "pictures": attack_pictures.campaign,
    "servers": attack_server.campaign,
    "taught runs of strangers": attack_taught.campaign,
    "commands at once": attack_together.campaign,
}


def attack(home: Path, seed: int, *, say: Callable[[object], None]) -> list[str]:
    """Run every campaign, print a row of the table for each, return all complaints."""
    table = Table("attack", "cases", "refused", "survived", "peak MB", "longest, s", "complaints")
    complaints: list[str] = []
    for name, campaign in ATTACKS.items():
        place = home / name
        place.mkdir()
        cases: list[Case] = []
        for case in campaign(place, seed):
            cases.append(case)
            say(f"[dim]{name}, {len(cases)}: {case.name}, {case.seconds:.1f} s[/dim]")
        found = [f"{name}, {case.name}: {text}" for case in cases for text in case.complaints]
        if not cases:
            say(f"[dim]{name} left out: not possible here[/dim]")
            continue
        refused = sum(case.refused for case in cases)
        largest, longest = max(c.megabytes for c in cases), max(c.seconds for c in cases)
        counts = (len(cases), refused, len(cases) - refused, f"{largest:,.0f}", f"{longest:.1f}")
        table.add_row(name, *map(str, counts), str(len(found)))
        complaints += found
    say(table)
    return complaints
