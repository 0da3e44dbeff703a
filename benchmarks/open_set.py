"""Is anything like a picture here, and is its class? How often the answers are right, by index.

    OMP_NUM_THREADS=1 python -m benchmarks.open_set FOLDER …

Each FOLDER, and the built-in characters, is trained on with the defaults, three times; the run's
index then holds three of four pictures of three of four classes. Asked for are the other pictures
of these classes ("known"), those of the classes that were left out, pictures of the other
collections, and drawn ones (flat, noise, gradients, text, screenshots).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

from nofuss.commands import console
from nofuss.config import Options
from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.model.encoder import load
from nofuss.ranking.open_set import Match
from nofuss.search import Index
from nofuss.search.verdict import Verdict, judged, queries_of
from nofuss.training.train import run_training

ANSWERS: tuple[Match, ...] = ("good", "unsure", "nothing")
QUERIES = 300
"""Pictures of each kind that are asked for at most."""
RELATED = {
    "sunflower",
    "lotus",
    "water_lilly",
    "emu",
    "flamingo",
    "flamingo_head",
    "ibis",
    "pigeon",
}
"""Classes of Caltech-101 that are flowers or birds, which other collections are of: left out."""
DRAWN = ("flat", "noise", "gradient", "text", "screenshot")


def drawn(kind: str, random: np.random.Generator) -> Image.Image:
    """Draw a picture of nothing."""
    side = 256
    if kind == "flat":
        return Image.new("RGB", (side, side), tuple(random.integers(0, 256, 3).tolist()))
    if kind == "noise":
        return Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
    if kind == "gradient":
        ends = random.integers(0, 256, (2, 3))
        ramp = np.linspace(0, 1, side)[:, None]
        row = (ends[0] * (1 - ramp) + ends[1] * ramp).astype(np.uint8)
        picture = Image.fromarray(np.broadcast_to(row, (side, side, 3)).copy())
        return picture.rotate(int(random.integers(4)) * 90)
    picture = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    if kind == "screenshot":
        draw.rectangle((0, 0, side, 24), fill=tuple(random.integers(0, 256, 3).tolist()))
        for _ in range(6):
            x, y, width, height = random.integers((0, 30, 20, 10), (200, 220, 120, 60)).tolist()
            shade = tuple(random.integers(180, 256, 3).tolist())
            draw.rectangle((x, y, x + width, y + height), fill=shade, outline="gray")
    for y in range(32, side, 14):
        words = "".join(random.choice([*"abcdefghij klmno pqrstu"], 40))
        draw.text((8 + int(random.integers(30)), y), words, fill="black")
    return picture


def pictures() -> list[Image.Image]:
    """Return forty drawn pictures of each kind."""
    random = np.random.default_rng(0)
    return [drawn(kind, random) for kind in DRAWN for _ in range(40)]


def parts(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return rows to index, other pictures of their classes, and pictures of left-out classes."""
    random = np.random.default_rng(seed)
    is_left = np.isin(labels, random.permutation(int(labels.max()) + 1)[::4])
    is_new = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        is_new[random.permutation(np.flatnonzero(labels == label))[::4]] = True
    found = (~is_left & ~is_new, ~is_left & is_new, is_left)
    return [np.flatnonzero(each) for each in found]


def some(rows: np.ndarray) -> np.ndarray:
    """Return a sample of rows."""
    return np.sort(np.random.default_rng(0).permutation(rows)[:QUERIES])


def opened(path: Path | None) -> Collection:
    """Open a collection without the classes that another one is of, and without its split."""
    found = open_data(path)
    related = [name in RELATED for name in found.class_names]
    rows = np.flatnonzero(~np.array(related)[found.labels])
    return replace(found.subset(rows), split=None)


def ask(collections: Sequence[Collection], at: int, seed: int, run: Path) -> list[list[Verdict]]:
    """Train on most of a collection, and return what its index says of each kind of picture."""
    asked, others = collections[at], [*collections[:at], *collections[at + 1 :]]
    indexed, new, left_out = parts(asked.labels, seed)
    run_training(Options(out=run), asked.subset(indexed))
    encoder, index = load(run), Index.load(run / "index")
    subsets = [asked.subset(some(new)), asked.subset(some(left_out))]
    subsets += [other.subset(some(np.arange(len(other)))) for other in others]
    encoded = [encoder.encode_collection(each) for each in subsets]
    encoded.append(encoder.encode(pictures()))
    known, unknown, *far, nothing = (judged(index, queries_of(index, each)) for each in encoded)
    return [known, unknown, [verdict for each in far for verdict in each], nothing]


def cell(verdicts: Sequence[Verdict]) -> str:
    """Return the percentages of the three answers."""
    found = [verdict.match for verdict in verdicts]
    return " / ".join(f"{100 * found.count(answer) / len(found):.1f}" for answer in ANSWERS)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    collections, rows = [opened(path) for path in [*asked.data, None]], []
    for at, collection in enumerate(collections):
        with TemporaryDirectory() as scratch:
            runs = [(seed, Path(scratch) / str(seed)) for seed in range(asked.seeds)]
            found = [ask(collections, at, seed, run) for seed, run in runs]
        kinds = [[v for each in kind for v in each] for kind in zip(*found, strict=True)]
        rows.append([collection.name, *map(cell, kinds)])
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["index of", "known", "left-out class", "other collections", "drawn"]
    console.table("% good / unsure / nothing", columns, rows)


if __name__ == "__main__":
    main()
