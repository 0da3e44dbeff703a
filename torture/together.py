"""Run commands at the same time on one run: nothing may be lost or mixed.

The second command must name the process of the first. Which one is first is up to the system, so
every race is run several times.
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from torture.commands import Case, Commands, Ended
from torture.disk import remains
from torture.training import FLAGS, write_pictures

WRITING = ("is being written by process", "is not empty and is never overwritten")


def campaign(home: Path, seed: int, *, rounds: int = 6) -> Iterator[Case]:
    """Run races, kills, and commands during a training."""
    draw, commands, data = random.Random(seed), Commands(home), write_pictures(home / "data")
    ended = commands("train", data, "--out", home / "whole", *FLAGS, "--epochs", "2")
    assert ended.code == 0, ended.said
    for number in range(rounds):
        yield _two_trainings(commands, data, home / f"twice-{number}", draw)
        yield _killed_and_resumed(commands, data, home / f"killed-{number}", draw)
        run = Path(shutil.copytree(home / "whole", home / f"indexed-{number}"))
        yield _two_updates_and_a_search(commands, data, run, draw)


def _case(name: str, ended: list[Ended], complaints: list[str]) -> Case:
    found = [text for each in ended for text in each.complaints()]
    refused, seconds = any(each.refused for each in ended), max(each.seconds for each in ended)
    return Case(name, refused, seconds, found + complaints)


def _two_trainings(commands: Commands, data: Path, run: Path, draw: random.Random) -> Case:
    """Start two trainings: one finishes with its settings; the other leaves nothing."""
    words = ("train", data, "--out", run, *FLAGS, "--epochs", "3", "--seed")
    first = commands.start(*words, 1)
    time.sleep(draw.uniform(0, 0.3))
    both = [commands(*words, 2), first.wait()][::-1]
    winners = [seed for seed, ended in enumerate(both, 1) if ended.code == 0]
    complaints = [f"left behind: {path.name}" for path in remains(run)]
    if len(winners) != 1 or not any(words in e.said for e in both for words in WRITING):
        complaints.append(f"{len(winners)} trained: {[e.line for e in both]}")
    elif json.loads((run / "config.json").read_text())["seed"] != winners[0]:
        complaints.append("the settings are those of the other")
    return _case("two trainings into one folder", both, complaints)


def _two_updates_and_a_search(
    commands: Commands, data: Path, run: Path, draw: random.Random
) -> Case:
    """Index two folders at once while somebody searches; who was refused tries again."""
    ended = [commands("index", run, data / "class 0")]
    left, complaints = [data / "class 1", data / "class 2"], list[str]()
    while left:
        running = []
        for folder in left:
            running.append((folder, commands.start("index", run, folder)))
            time.sleep(draw.uniform(0, 0.2))
        reader = commands("search", run, data / "class 0" / "0.png", "--json")
        if reader.code:
            complaints.append(f"search said {reader.line!r}")
        results = {folder: started.wait() for folder, started in running}
        ended += results.values()
        if any(each.code not in (0, 2) for each in results.values()):
            break
        left = [folder for folder in left if results[folder].code]
    for number in range(3):
        picture = data / f"class {number}" / "0.png"
        found = commands("search", run, picture, "-k", 1, "--json")
        if found.code or str(picture) not in found.said:
            complaints.append(f"lost: {picture}")
    return _case("two updates of one index", ended, complaints)


def _killed_and_resumed(commands: Commands, data: Path, run: Path, draw: random.Random) -> Case:
    """Write into a run during its training, resume right after a kill: no lock must remain."""
    first = commands.start("train", data, "--out", run, *FLAGS, "--epochs", "2000")
    first.wait_for("epoch   1")
    second = [
        commands("train", data, "--out", run, *FLAGS),
        commands("train", "--out", run, "--resume"),
        commands("evaluate", run),
        commands("index", run),
    ]
    time.sleep(draw.uniform(0, 0.5))
    first.send(signal.SIGKILL)
    again = commands.start("train", "--out", run, "--resume")
    again.wait_for("resuming at epoch")
    again.send(signal.SIGINT)
    resumed = again.wait()
    first.wait()
    complaints = [f"left behind: {path.name}" for path in remains(run)]
    if resumed.code != 130:
        complaints.append(f"did not resume: {resumed.line!r}")
    writer = f"is being written by process {first.child.pid} "
    complaints += [f"printed {each.line!r}" for each in second if writer not in each.line]
    return _case("commands beside a training, and after a kill", second, complaints)
