"""Kill `nofuss index` (SIGKILL) at random moments, in a folder and in databases.

An index is written, killed and written again until it is complete; then the next one. A complete
index must hold the same items, notes and vectors, bit for bit, as one that nothing disturbed.
"""

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np

from nofuss.model.saved import model_digest
from nofuss.search.engines import open_engine
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Index
from torture.commands import Case, Commands
from torture.databases import ENGINES, missing, running

ITEMS, DIM = 6_000, 16
FOLDER = "folder"
"""The run's own index: each is in a copy of the run."""
STARTED = "vectors"  # in the line that describes the data
Content = dict[str, tuple[tuple[object, ...], bytes]]


def campaign(
    home: Path, seed: int, *, engines: tuple[str, ...] = (FOLDER, *ENGINES), kills: int = 10
) -> Iterator[Case]:
    """Kill until the count is reached, in one database after the other."""
    commands, draw, data = Commands(home), random.Random(seed), np.random.default_rng(0)
    for name, count in (("few", 60), ("many", ITEMS)):
        vectors = data.normal(size=(count, DIM)).astype(np.float32)
        np.savez(home / f"{name}.npz", vectors=vectors, labels=np.arange(count) % 6)
    made = commands("train", home / "few.npz", "--out", home / "run", "--dim", "8")
    assert made.code == 0, made.said
    about = About(model_digest(home / "run" / "model"), 8)
    for engine in engines:
        if engine != FOLDER and (reason := missing(engine)):
            print(f"{engine} left out: {reason}")
            continue
        (home / engine).mkdir()
        with running(engine, home / engine) if engine != FOLDER else nullcontext("") as url:

            def words(name: str, url: str = url) -> tuple[object, ...]:
                run = home / "run"
                if not url and not (run := home / FOLDER / name).exists():
                    shutil.copytree(home / "run", run)
                return "index", run, home / "many.npz", *(("--to", url.format(name)) if url else ())

            def content(name: str, url: str = url) -> Content:
                if url:
                    return content_of(open_engine(url.format(name), about))
                return content_of(FolderIndex.load(home / FOLDER / name / "index"))

            whole = commands(*words("undisturbed"))
            assert whole.code == 0, whole.said
            reference, done, number = content("undisturbed"), 0, 0
            while done < kills:
                name, killed = f"killed_{number}", True
                while killed and done < kills:
                    process = commands.start(*words(name))
                    process.wait_for(STARTED)
                    time.sleep(draw.uniform(0, whole.seconds))
                    killed = process.child.is_alive()
                    process.child.kill()
                    process.wait()
                    done += killed
                ended = commands(*words(name))
                assert ended.code == 0, ended.said
                complaints = compare(content(name), reference)
                yield Case(f"{engine}, {done} kills", False, ended.seconds, complaints)
                number += 1


def content_of(index: Index) -> Content:
    """Return everything that an index holds, by name, and close it."""
    with closing(index):
        return {
            item.name: (item._replace(vector=None, features=None), item.vector.numpy().tobytes())
            for item in index.items(vectors=True)
            if item.vector is not None
        }


def compare(found: Content, reference: Content) -> list[str]:
    """Return what differs."""
    if found == reference:
        return []
    missing, extra = reference.keys() - found.keys(), found.keys() - reference.keys()
    other = sum(found[item] != reference[item] for item in found.keys() & reference.keys())
    return [f"{len(missing)} items missing, {len(extra)} too many, {other} differ"]
