"""Kill `nofuss index --to` (SIGKILL) at random moments, in every database that can be started here.

An index is written, killed and written again until it is complete; then the next one. A complete
index must hold the same items, notes and vectors, bit for bit, as one that nothing disturbed.
"""

import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nofuss.errors import RunError
from nofuss.model.saved import model_digest
from nofuss.search.engines import open_engine
from nofuss.search.index import About
from torture.databases import running
from torture.kill import Process, executed
from torture.training import command, environment

ITEMS, DIM = 6_000, 16
STARTED = "vectors"  # in the line that describes the data
Content = dict[str, tuple[tuple[object, ...], bytes]]


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
    subprocess.run(
        command("train", home / "few.npz", "--out", home / "run", "--dim", "8"),
        env=environment(home),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return home / "run"


def campaign(engine: str, *, kills: int, seed: int) -> Iterator[Tally]:
    """Kill until the count is reached; yield the tally after each process."""
    tally, draw = Tally(engine), random.Random(f"{seed} {engine}")
    with tempfile.TemporaryDirectory(prefix="kill-index-") as folder:
        home = Path(folder)
        run = prepare(home)
        about = About(model_digest(run / "model"), 8)
        with running(engine, home) as url:
            indexing = _Indexing(home, run, url)
            span = indexing.finish("undisturbed")
            reference = content(url.format("undisturbed"), about)
            while True:
                name = f"killed_{tally.finished}"
                if tally.kills < kills and indexing.kill(name, after=draw.uniform(0, span)):
                    tally.kills += 1
                    tally.partial += 0 < _count(url.format(name), about) < ITEMS
                    yield tally
                    continue
                indexing.finish(name)
                tally.complaints += compare(name, content(url.format(name), about), reference)
                tally.finished += 1
                yield tally
                if tally.kills == kills:
                    return


class _Indexing:
    """`nofuss index --to` of many vectors, as a user runs it."""

    def __init__(self, home: Path, run: Path, url: str) -> None:
        self._start, self._log, self._url = executed(home, "nofuss"), home / "log.txt", url
        self._words = ("index", run, home / "many.npz", "--to")

    def _begin(self, name: str) -> Process:
        """Start it, and wait until it has opened the data or ended."""
        process = self._start((*self._words, self._url.format(name)), self._log)
        while STARTED not in self._log.read_text() and process.poll() is None:
            time.sleep(0.01)
        return process

    def finish(self, name: str) -> float:
        """Run it to its end; return the seconds since it had opened the data."""
        process, began = self._begin(name), time.monotonic()
        if process.wait():
            raise RuntimeError(f"{name}: {self._log.read_text()[-500:]}")
        return time.monotonic() - began

    def kill(self, name: str, *, after: float) -> bool:
        """Kill it some seconds after it has opened the data; return False if it ended before."""
        process, until = self._begin(name), time.monotonic() + after
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True


def content(url: str, about: About) -> Content:
    """Return everything that an index holds, by name."""
    with closing(open_engine(url, flag="--index", wanted=about)) as index:
        return {
            item.name: (item._replace(vector=None), item.vector.numpy().tobytes())
            for item in index.items(vectors=True)
            if item.vector is not None
        }


def compare(name: str, found: Content, reference: Content) -> list[str]:
    """Return what differs."""
    if found == reference:
        return []
    missing, extra = reference.keys() - found.keys(), found.keys() - reference.keys()
    other = sum(found[item] != reference[item] for item in found.keys() & reference.keys())
    return [f"{name}: {len(missing)} items missing, {len(extra)} too many, {other} differ"]


def _count(url: str, about: About) -> int:
    try:
        with closing(open_engine(url, flag="--index", wanted=about)) as index:
            return index.count()
    except RunError:
        return 0  # killed before it was made
