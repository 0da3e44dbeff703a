"""Kill `nofuss index --to` (SIGKILL) at random moments, in every database that can be started here.

An index is written, killed and written again until it is complete; then the next one. A complete
index must hold the same items, notes and vectors, bit for bit, as one that nothing disturbed.
"""

import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nofuss.search.stores import Record, open_store
from nofuss.search.stores.store import number_of
from torture.databases import running
from torture.kill import Process, executed
from torture.training import command, environment

ITEMS, DIM = 6_000, 16
STARTED = "vectors"  # in the line that describes the data
Content = dict[str, tuple[Record, bytes]]


@dataclass
class Tally:
    """What happened in one engine."""

    engine: str
    kills: int = 0
    finished: int = 0
    partial: int = 0
    """Kills that left some of the items, and not all."""
    complaints: list[str] = field(default_factory=list)


def prepare(home: Path) -> Path:
    """Train a run on a few vectors; write many to index beside it."""
    draw = np.random.default_rng(0)
    for name, count in (("few", 60), ("many", ITEMS)):
        vectors = draw.normal(size=(count, DIM)).astype(np.float32)
        np.savez(home / f"{name}.npz", vectors=vectors, labels=np.arange(count) % 6)
    flags = ("--epochs", "1", "--dim", "8", "--folds", "0")
    subprocess.run(
        command("train", home / "few.npz", "--out", home / "run", *flags),
        env=environment(home),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return home / "run"


def campaign(engine: str, *, kills: int, seed: int) -> Iterator[Tally]:
    """Kill until the count is reached; yield the tally after each process."""
    tally, draw = Tally(engine), random.Random(f"{seed} {engine}")
    home = Path(tempfile.mkdtemp(prefix="kill-index-"))
    try:
        run = prepare(home)
        with running(engine, home) as url:
            start = executed(home)
            log = home / "log.txt"
            words = ("index", run, home / "many.npz", "--to")
            process = start((*words, url.format("undisturbed")), log)
            _wait(process, log)
            began = time.monotonic()
            if process.wait():
                tally.complaints.append(f"undisturbed: {log.read_text()}")
                yield tally
                return
            span, reference = time.monotonic() - began, content(url.format("undisturbed"))
            while tally.kills < kills:
                name = f"killed_{tally.finished}"
                process = start((*words, url.format(name)), log)
                _wait(process, log)
                until = time.monotonic() + draw.uniform(0, span)
                while process.poll() is None and time.monotonic() < until:
                    time.sleep(0.002)
                if process.poll() is None and draw.random() < 0.9:
                    process.kill()
                    process.wait()
                    tally.kills += 1
                    tally.partial += 0 < _count(url.format(name)) < ITEMS
                    yield tally
                    continue
                if process.wait():
                    tally.complaints.append(f"{name}: {log.read_text()[-300:]}")
                tally.complaints += compare(name, content(url.format(name)), reference)
                tally.finished += 1
                yield tally
            subprocess.run(
                command(*words, url.format(name)),
                env=environment(home),
                check=True,
                stdout=subprocess.DEVNULL,
            )
            tally.complaints += compare(name, content(url.format(name)), reference)
            tally.finished += 1
            yield tally
    finally:
        shutil.rmtree(home, ignore_errors=True)


def content(url: str) -> Content:
    """Return everything that an index holds, by name."""
    with closing(open_store(url, flag="--index")) as store:
        assert store.about is not None
        records = {record.item.name: record for record in store.records()}
        numbers = dict(
            vector for chunk in store.chunks(1000) for vector in zip(*chunk, strict=True)
        )
        return {
            name: (record, numbers[number_of(name)].numpy().tobytes())
            for name, record in records.items()
        }


def compare(name: str, found: Content, reference: Content) -> list[str]:
    """Return what differs."""
    if found == reference:
        return []
    missing, extra = reference.keys() - found.keys(), found.keys() - reference.keys()
    other = sum(found[item] != reference[item] for item in found.keys() & reference.keys())
    return [f"{name}: {len(missing)} items missing, {len(extra)} too many, {other} differ"]


def _count(url: str) -> int:
    with closing(open_store(url, flag="--index")) as store:
        return 0 if store.about is None else len(store)


def _wait(process: Process, log: Path) -> None:
    """Wait until the command has opened the data, or ended."""
    while STARTED not in log.read_text() and process.poll() is None:
        time.sleep(0.01)
