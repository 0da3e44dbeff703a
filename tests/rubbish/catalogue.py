"""The table, and sound data for the rubbish to lie among."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

QUICK = ("--epochs", "1", "--dim", "4", "--out", "run")
Make = Callable[[Path], list[object]]
CATALOGUE: dict[str, tuple[Make, int, str]] = {}


def rubbish(name: str, code: int, said: str) -> Callable[[Make], Make]:
    def enter(make: Make) -> Make:
        assert name not in CATALOGUE
        CATALOGUE[name] = make, code, said
        return make

    return enter


def picture(seed: int, *, side: int = 20) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))


def photos(here: Path, classes: int = 4, each: int = 3) -> Path:
    """Sound data, for the rubbish to lie among."""
    for c in range(classes):
        (here / "photos" / f"class {c}").mkdir(parents=True)
        for i in range(each):
            picture(10 * c + i).save(here / "photos" / f"class {c}" / f"{i}.png")
    return here / "photos"


def train(data: Path, *words: object) -> list[object]:
    return ["train", data, *QUICK, *words]


def table(here: Path, *rows: str) -> list[object]:
    photos(here)
    (here / "x.csv").write_text("\n".join(rows) + "\n")
    return train(here / "x.csv")


def arrays(here: Path, **named: object) -> list[object]:
    np.savez(here / "x.npz", **named)  # type: ignore[arg-type]
    return train(here / "x.npz")
