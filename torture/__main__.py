"""`python -m torture [--kills N] [--seed N] [--only CAMPAIGN …]`: print a table for each campaign.

Each campaign runs in a process of its own, several at once (--jobs). Exits with 1 if anything was
lost, unclear or late.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torture import damage, databases, disk, kill, kill_index, memory
from torture.attack import attack
from torture.faults import faulty_commands
from torture.fuzz import fuzz
from torture.training import LAST_STAGES, prepare

FINDINGS = Path("torture-findings")
"""Where the inputs are kept that fuzzing found something with."""
console = Console(soft_wrap=True, highlight=False)


def kills(home: Path, options: argparse.Namespace) -> list[str]:
    """Kill with 0, 1 and 2 loader workers, a quarter within saves; forked and started processes."""
    place = prepare(home, epochs=12)
    each = -(-options.kills // 3)
    header = ("process", "workers", "kills", "in a save", "runs finished", "steps lost")
    table = Table(*header, "complaints")
    complaints: list[str] = []
    with faulty_commands(home) as commands:
        for how, start, count in (
            ("forked", commands.start, each),
            ("python -m nofuss", kill.executed(home), -(-each // 8)),
        ):
            for workers in range(3):
                tally = _last(
                    kill.campaign(
                        place,
                        start,
                        workers,
                        kills=count,
                        in_saves=-(-count // 4),
                        seed=options.seed,
                    )
                )
                row = (how, workers, tally.kills, tally.in_saves, tally.finished)
                table.add_row(*map(str, (*row, f"≤ {max(1, tally.lost)}", len(tally.complaints))))
                complaints += tally.complaints
    console.print(table)
    return complaints


def indexes(home: Path, options: argparse.Namespace) -> list[str]:
    """Kill `nofuss index --to` in each database that is installed, ten times at least."""
    table = Table("database", "kills", "of them within", "indexes finished", "complaints")
    complaints: list[str] = []
    for engine in databases.ENGINES:
        if reason := databases.missing(engine):
            console.print(f"[dim]{engine} left out: {reason}[/dim]")
            continue
        kills = max(10, options.kills // 20)
        for tally in kill_index.campaign(engine, kills=kills, seed=options.seed):
            console.print(f"[dim]{tally}[/dim]")
        row = (tally.kills, tally.partial, tally.finished, len(tally.complaints))
        table.add_row(engine, *map(str, row))
        complaints += [f"{engine}, {complaint}" for complaint in tally.complaints]
    console.print(table)
    return complaints


def _last(tallies: Iterator[kill.Tally]) -> kill.Tally:
    for tally in tallies:
        console.print(f"[dim]{tally}[/dim]")
    return tally


def disks(home: Path, options: argparse.Namespace) -> list[str]:
    """Fail every write of a run in turn, in every way; and run on disks that are too small."""
    place = prepare(home, epochs=2)
    table = _Disks()
    with faulty_commands(home) as run_command:
        writes = range(1, disk.writes_of(run_command, place) + 1, options.every)
        for kind in disk.KINDS:
            table.add(
                kind, {at: disk.run_with_fault(run_command, place, kind, at) for at in writes}
            )
        if disk.can_mount(place):
            sizes = [4 * 2**i for i in range(12)]  # KB, to 8 MB
            table.add("really full", {size: disk.fill(run_command, place, size) for size in sizes})
    return table.show()


def caches(home: Path, options: argparse.Namespace) -> list[str]:
    """Fail every write into the cache of a run that keeps activations, in every way."""
    place = prepare(home, epochs=3, flags=LAST_STAGES)
    table = _Disks()
    with faulty_commands(home) as run_command:
        writes = range(1, disk.cache_writes_of(run_command, place) + 1, options.every)
        for kind in disk.KINDS:
            faults = {at: disk.run_with_cache_fault(run_command, place, kind, at) for at in writes}
            table.add(kind, faults)
    return table.show()


class _Disks:
    """The table of a campaign on disks, a row a kind of failure."""

    def __init__(self) -> None:
        header = ("faults", "refused", "without effect", "slowest end, s", "complaints")
        self.table, self.complaints = Table("disk", *header), list[str]()

    def add(self, kind: str, verdicts: dict[int, disk.Verdict]) -> None:
        """Add the verdicts of a kind."""
        found = [f"{kind}, {at}: {text}" for at, v in verdicts.items() for text in v.complaints]
        without = sum(verdict.finished for verdict in verdicts.values())
        slowest = max(verdict.seconds for verdict in verdicts.values())
        counts = (len(verdicts), len(verdicts) - without, without, f"{slowest:.1f}", len(found))
        self.table.add_row(kind, *map(str, counts))
        console.print(f"[dim]{kind}: {len(verdicts)} done, {len(found)} complaints[/dim]")
        self.complaints += found

    def show(self) -> list[str]:
        """Print the table; return all complaints."""
        console.print(self.table)
        return self.complaints


def damages(home: Path, options: argparse.Namespace) -> list[str]:
    """Damage every file of a run."""
    place = prepare(home, epochs=2)
    counts: defaultdict[str, list[damage.Case]] = defaultdict(list)
    with faulty_commands(home) as run_command:
        for case in damage.campaign(run_command, place, flips=options.flips, seed=options.seed):
            counts[case.file].append(case)
    table = Table("file", "damages", "noticed", "complaints")
    for file, cases in counts.items():
        noticed = sum(case.noticed for case in cases)
        table.add_row(file, *map(str, (len(cases), noticed, sum(len(c.complaints) for c in cases))))
    console.print(table)
    return [
        f"{c.file}, {c.damage}: {x}"
        for cases in counts.values()
        for c in cases
        for x in c.complaints
    ]


def memories(home: Path, options: argparse.Namespace) -> list[str]:
    """Measure the peak memory of every command."""
    table = Table("command", "peak MB")
    for row in memory.every_command(home):
        table.add_row(row.what, f"{row.megabytes:,.0f}")
    longer = list(memory.over_epochs(home / "long", 5, 15, 150))
    for row in longer:
        table.add_row(f"train, {row.what}", f"{row.megabytes:,.1f}")
    console.print(table)
    grown = longer[-1].megabytes - longer[0].megabytes
    return [f"memory grows with the epochs: {grown:.0f} MB"] if grown > 10 else []


def attacks(home: Path, options: argparse.Namespace) -> list[str]:
    """Attack commands with what strangers may send."""
    return attack(home, options.seed, say=console.print)


def fuzzing(home: Path, options: argparse.Namespace) -> list[str]:
    """Send changed bytes to every parser, for some minutes in all."""
    from torture.fuzz_targets import TARGETS

    table = Table("parser", "cases", "refused", "read", "peak MB", "longest, s", "findings")
    complaints: list[str] = []
    keep, seconds = FINDINGS.absolute(), 60 * options.minutes
    for tally in fuzz(TARGETS, home, seconds=seconds, seed=options.fuzz_seed, keep=keep):
        console.print(f"[dim]{tally.name}: {tally.cases:,} cases[/dim]")
        counts = (tally.cases, tally.refused, tally.cases - tally.refused)
        costs = (f"{tally.megabytes:.0f}", f"{tally.seconds:.2f}", str(len(tally.findings)))
        table.add_row(tally.name, *(f"{count:,}" for count in counts), *costs)
        complaints += [f"{tally.name}: {finding}" for finding in tally.findings]
    console.print(table)
    return complaints


def properties(home: Path, options: argparse.Namespace) -> list[str]:
    """Run the tests that take any bytes, with many more examples than `make test`."""
    words = ["-q", "-m", "fuzz", "--hypothesis-profile=torture", f"--basetemp={home / 'tests'}"]
    code = subprocess.run([sys.executable, "-m", "pytest", *words]).returncode
    return [f"pytest ended with {code}"] if code else []


# The longest first, so that none is left alone at the end.
CAMPAIGNS: dict[str, Callable[[Path, argparse.Namespace], list[str]]] = {
    "fuzz": fuzzing,
    "properties": properties,
    "attack": attacks,
    "kill": kills,
    "disk": disks,
    "cache": caches,
    "index": indexes,
    "damage": damages,
    "memory": memories,
}


def main() -> int:
    """Run the campaigns one after the other."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=201, help="total kills; a third for each number of workers"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and damages")
    parser.add_argument("--every", type=int, default=1, help="fail only every n-th write")
    parser.add_argument(
        "--flips", type=int, default=4, help="bits to flip in each file, one at a time"
    )
    parser.add_argument("--minutes", type=float, default=60, help="of fuzzing, in all")
    parser.add_argument(
        "--fuzz-seed", type=int, default=None, help="seed of the fuzzing; a fresh one if left out"
    )
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="campaigns at once"
    )
    options = parser.parse_args()
    if len(options.only) > 1:
        return at_once(options.only, options.jobs, _without_choice(sys.argv[1:]))
    if options.fuzz_seed is None:
        options.fuzz_seed = secrets.randbits(32)
    complaints: list[str] = []
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix=f"torture-{name}-") as home:
            complaints += CAMPAIGNS[name](Path(home), options)
    for complaint in complaints:
        console.print(f"complaint: {complaint}", markup=False)
    console.print("nothing lost" if not complaints else f"{len(complaints)} complaints")
    return 1 if complaints else 0


def _without_choice(words: Sequence[str]) -> list[str]:
    """Return the command line without --only and --jobs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--jobs")
    return parser.parse_known_args(list(words))[1]


def at_once(names: Sequence[str], jobs: int, words: Sequence[str]) -> int:
    """Run campaigns in processes of their own; print what each says when it has ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # so that they do not wait for each other

    def run(name: str) -> tuple[str, int, str]:
        command = [sys.executable, "-m", "torture", "--only", name, *words]
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return name, ended.returncode, ended.stdout

    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, name) for name in names]):
            name, code, said = future.result()
            print(f"== {name} ==\n{said}", flush=True)
            failed += [name] if code else []
    print("nothing lost" if not failed else f"complaints of: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
