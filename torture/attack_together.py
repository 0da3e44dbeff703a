"""Run commands at the same time on one run: nothing may be lost or mixed.

The second command must name the process of the first. Which one is first is up to the system, so
every race is run several times.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from nofuss.search import Index
from torture.disk import remains
from torture.forked import Forked, run_forked
from torture.measured import Case, Ended
from torture.training import FLAGS, write_pictures

ROUNDS = 6
WRITING = ("is being written by process", "is not empty and is never overwritten")


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run races, kills, and commands during a training."""
    draw = random.Random(seed)
    data, whole = write_pictures(home / "data"), home / "whole"
    ended = run_forked(home, "train", data, "--out", whole, *FLAGS, "--epochs", "2")
    assert ended.code == 0, ended.said
    for number in range(ROUNDS):
        yield _two_trainings(home, data, number, draw)
        yield _two_updates(home, data, whole, draw)
        yield _update_and_search(home, data, whole, draw)
        yield _killed_and_resumed(home, data, number, draw)


def _fresh(home: Path, whole: Path) -> Path:
    run = home / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    return run


def _case(name: str, ended: list[Ended], *complaints: str) -> Case:
    found = [text for each in ended for text in each.complaints()]
    refused = any(each.refused for each in ended)
    seconds, megabytes = max(e.seconds for e in ended), max(e.megabytes for e in ended)
    return Case(name, refused, seconds, megabytes, [*found, *complaints])


def _two_trainings(home: Path, data: Path, number: int, draw: random.Random) -> Case:
    """Start two trainings: one finishes with its settings; the other leaves nothing."""
    run = home / f"twice-{number}"
    words = ("train", data, "--out", run, *FLAGS, "--epochs", "3", "--seed")
    first = Forked(home, *words, 1)
    time.sleep(draw.uniform(0, 0.3))
    both = [Forked(home, *words, 2).wait(), first.wait()][::-1]
    complaints = []
    winners = [seed for seed, ended in enumerate(both, 1) if ended.code == 0]
    if len(winners) != 1 or not any(words in e.said for e in both for words in WRITING):
        complaints.append(f"{len(winners)} trained: {[e.line for e in both]}")
    elif json.loads((run / "config.json").read_text())["seed"] != winners[0]:
        complaints.append("the settings are those of the other")
    complaints += [f"left behind: {path.name}" for path in remains(run)]
    return _case("two trainings into one folder", both, *complaints)


def _two_updates(home: Path, data: Path, whole: Path, draw: random.Random) -> Case:
    """Index two folders at once; a command that was refused tries again."""
    run, wanted = _fresh(home, whole), [data / "class 0", data / "class 1"]
    left, ended = list(wanted), list[Ended]()
    while left:
        running = []
        for folder in left:
            running.append((folder, Forked(home, "index", run, folder)))
            time.sleep(draw.uniform(0, 0.2))
        results = {folder: started.wait() for folder, started in running}
        ended += results.values()
        if any(each.code not in (0, 2) for each in results.values()):
            break
        left = [folder for folder in left if results[folder].code]
    kept = {Path(name).parent for name in Index.load(run / "index").names}
    lost = [f"lost: {folder.name}" for folder in wanted if folder not in kept]
    return _case("two updates of one index", ended, *lost)


def _update_and_search(home: Path, data: Path, whole: Path, draw: random.Random) -> Case:
    """Search during an update: the reader finds the old index or the new one."""
    run = _fresh(home, whole)
    ended = [run_forked(home, "index", run, data / "class 0")]
    writer = Forked(home, "index", run, data / "class 1")
    time.sleep(draw.uniform(0, 1.0))
    reader = run_forked(home, "search", run, data / "class 0" / "0.png", "--json")
    ended += [writer.wait(), reader]
    complaints = [] if reader.code == 0 else [f"search said {reader.line!r}"]
    return _case("a search while the index is replaced", ended, *complaints)


def _killed_and_resumed(home: Path, data: Path, number: int, draw: random.Random) -> Case:
    """Resume during a training, and right after it is killed: its lock must not remain."""
    run = home / f"killed-{number}"
    first = Forked(home, "train", data, "--out", run, *FLAGS, "--epochs", "2000")
    first.wait_for("epoch   1")
    second = run_forked(home, "train", "--out", run, "--resume")
    time.sleep(draw.uniform(0, 0.5))
    first.process.kill()
    again = Forked(home, "train", "--out", run, "--resume")
    again.wait_for("resuming at epoch")
    os.kill(int(again.process.pid or 0), signal.SIGINT)
    resumed = again.wait()
    first.wait()
    complaints = [] if resumed.code == 130 else [f"did not resume: {resumed.line!r}"]
    if f"is being written by process {first.process.pid} " not in second.line:
        complaints.append(f"the second command printed {second.line!r}")
    complaints += [f"left behind: {path.name}" for path in remains(run)]
    return _case("a resumption beside, and after a kill", [second, resumed], *complaints)
