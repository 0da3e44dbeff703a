"""`han`: Han and Hangul characters, a collection of the size of Stanford Online Products.

22,634 classes in 120,053 pictures: 11,318 classes (59,551 pictures) for training, 11,316 (60,502)
for testing, as in Song et al. 2016; with the typefaces of Debian 12, 14,121 are Han and 8,513
Hangul. A class is a character, an item its picture in one of nine typefaces of Debian's packages:
gray, white on black, 28 × 28, the ink centred. The nearest neighbour by raw pixels is of the same
character for about 31 % of the test pictures.

Characters that five typefaces or more have are drawn from with a fixed seed, and so are their
sides and which of their pictures are kept (two at least). Two typefaces whose pictures of a
character are nearly equal count as one, and a character whose picture in some typeface is that of
another is left out. Rendering takes 20 seconds of processor time and is kept in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import TEST, TRAIN, Collection
from nofuss.data.readers.glyphs import Arrays, Pixels, codes_in, draw, drawn_once
from nofuss.errors import DataError

SIDE = 28
FONT_SIZE = 26
"""Pixels per em: a Han character takes nearly all of it."""
FACES = {
    "NotoSansCJK-Regular.ttc": "fonts-noto-cjk",
    "NotoSerifCJK-Regular.ttc": "fonts-noto-cjk",
    "ukai.ttc": "fonts-arphic-ukai",
    "uming.ttc": "fonts-arphic-uming",
    "wqy-zenhei.ttc": "fonts-wqy-zenhei",
    "wqy-microhei.ttc": "fonts-wqy-microhei",
    "UnBatang.ttf": "fonts-unfonts-core",
    "UnGungseo.ttf": "fonts-unfonts-core",
    "UnPilgi.ttf": "fonts-unfonts-core",
}
"""Font file → the package of Debian and Ubuntu that has it."""
BLOCKS = (range(0x4E00, 0xA000), range(0xAC00, 0xD7A4))
"""CJK Unified Ideographs, Hangul Syllables."""
ALIKE = 0.95
"""Cosine of the pixels from which on two pictures of a character count as one."""
FEWEST_FACES, FEWEST_KEPT = 5, 2
"""Typefaces that must have a character, and pictures of it that are kept at least."""
SEED = 0
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """How many classes and pictures each side has."""

    classes: dict[str, int]
    pictures: dict[str, int]
    spare: float = 1.03
    """How many times as many characters, and pictures of each, are drawn: some are alike."""


PRODUCTS = Shape({TRAIN: 11_318, TEST: 11_316}, {TRAIN: 59_551, TEST: 60_502})
"""Stanford Online Products."""


def open_han() -> Collection:
    """Return the characters, from the cache or rendered now."""
    files = font_files()
    settings = (SIDE, FONT_SIZE, BLOCKS, ALIKE, FEWEST_FACES, FEWEST_KEPT, SEED, PRODUCTS)
    han = drawn_once("han", settings, files, lambda: render(files))
    return Collection(
        name="han",
        layout="Han and Hangul characters",
        array=han["images"],
        labels=han["labels"],
        class_names=tuple(chr(code) for code in han["codes"]),
        split=han["split"],
    )


def font_files() -> list[Path]:
    """Return where the typefaces are installed; refuse with the packages that are missing."""
    from matplotlib.font_manager import findSystemFonts

    installed = {Path(file).name: Path(file) for file in sorted(findSystemFonts())}
    if missing := sorted({FACES[name] for name in FACES if name not in installed}):
        raise DataError(
            "the data set han is drawn with typefaces that are not installed here; on Debian and "
            f"Ubuntu: apt-get install {' '.join(missing)}"
        )
    return [installed[name] for name in FACES]


def render(
    files: Sequence[Path],
    *,
    blocks: Sequence[range] = BLOCKS,
    shape: Shape = PRODUCTS,
    seed: int = SEED,
) -> Arrays:
    """Choose characters and pictures of them, draw these and some spare ones, keep what is usable.

    Which typeface has which character is known without drawing, so that little is drawn in vain.
    """
    random = np.random.default_rng(seed)
    chosen, codes_of = _choose(files, blocks, shape, random)
    drawn = [
        draw(file, codes.tolist(), side=SIDE, size=FONT_SIZE)
        for file, codes in zip(files, codes_of, strict=True)
    ]
    usable = distinct(codes_of, drawn)
    codes = np.concatenate([c[keep] for c, keep in zip(codes_of, usable, strict=True)])
    images = np.concatenate([d[keep] for d, keep in zip(drawn, usable, strict=True)])
    values, counts = np.unique(codes, return_counts=True)
    enough = chosen[np.isin(chosen, values[counts >= FEWEST_KEPT])]
    starts = np.cumsum([0, *shape.classes.values()])
    rows = []
    for i, name in enumerate(shape.classes):
        side = enough[starts[i] : starts[i + 1]]
        own = np.flatnonzero(np.isin(codes, side))
        kept = own[_some_rows(codes[own], shape.pictures[name], random, fewest=FEWEST_KEPT)]
        if len(side) < shape.classes[name] or len(kept) != shape.pictures[name]:
            raise DataError(
                f"these typefaces draw {len(kept):,} pictures of {len(side):,} usable characters, "
                f"and {shape.pictures[name]:,} of {shape.classes[name]:,} are needed; install the "
                "packages' current versions"
            )
        rows.append(kept[np.argsort(codes[kept], kind="stable")])
    order = np.concatenate(rows)
    class_codes, labels = np.unique(codes[order], return_inverse=True)
    return {
        "images": images[order],
        "labels": labels.astype(np.int64),
        "codes": class_codes.astype(np.int64),
        "split": np.repeat(list(shape.classes), [len(some) for some in rows]),
    }


def _choose(
    files: Sequence[Path], blocks: Sequence[range], shape: Shape, random: np.random.Generator
) -> tuple[Codes, list[Codes]]:
    """Return characters in random order, and which of them to draw in each typeface, sorted."""
    all_codes = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
    has = np.stack([np.isin(all_codes, list(codes_in(file))) for file in files])  # (faces, codes)
    candidates = np.flatnonzero(has.sum(0) >= FEWEST_FACES)
    wanted = sum(shape.classes.values())
    chosen = random.permutation(candidates)[: round(shape.spare * wanted)]
    faces, columns = np.nonzero(has[:, chosen])
    each = shape.spare * sum(shape.pictures.values()) / wanted
    rows = _some_rows(columns, round(each * len(chosen)), random, fewest=FEWEST_KEPT + 1)
    codes = all_codes[chosen]
    drawn_of = [columns[rows][faces[rows] == face] for face in range(len(files))]
    return codes, [np.sort(codes[columns_of_face]) for columns_of_face in drawn_of]


def distinct(codes_of: Sequence[Codes], drawn: Sequence[Pixels]) -> list[NDArray[np.bool_]]:
    """Return which pictures to use: neither blank, nor like an earlier face's, nor a homoglyph's.

    A homoglyph is a character whose picture in some typeface is, to the pixel, that of one with a
    lower code; it is left out in all typefaces.
    """
    pixels = [d.reshape(len(d), -1) for d in drawn]
    homoglyphs: set[int] = set()
    for codes, x in zip(codes_of, pixels, strict=True):
        _, first = np.unique(x, axis=0, return_index=True) if len(x) else (None, np.arange(0))
        copies = np.setdiff1d(np.flatnonzero(x.any(1)), first)
        homoglyphs.update(codes[copies].tolist())
    usable = []
    for i, (codes, x) in enumerate(zip(codes_of, pixels, strict=True)):
        keep = x.any(1) & ~np.isin(codes, list(homoglyphs))
        for earlier, y in zip(codes_of[:i], pixels[:i], strict=True):
            _, at, before = np.intersect1d(codes, earlier, assume_unique=True, return_indices=True)
            keep[at[_cosines(x[at], y[before]) > ALIKE]] = False
        usable.append(keep)
    return usable


def _cosines(x: NDArray[np.uint8], y: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the cosine of each row of x with the same row of y; of a blank one, 0."""
    a, b = x.astype(np.float32), y.astype(np.float32)
    products = [np.einsum("nd,nd->n", one, two) for one, two in ((a, b), (a, a), (b, b))]
    return np.asarray(products[0] / np.maximum(np.sqrt(products[1] * products[2]), 1))


def _some_rows(
    classes: NDArray[np.int64], count: int, random: np.random.Generator, *, fewest: int
) -> NDArray[np.int64]:
    """Return `count` random rows, ascending; at least `fewest` of each class, if it has them."""
    rows = random.permutation(len(classes))
    order = np.argsort(classes[rows], kind="stable")
    _, starts, sizes = np.unique(classes[rows][order], return_index=True, return_counts=True)
    place = np.empty(len(rows), dtype=np.int64)  # of each row among those of its class
    place[order] = np.arange(len(rows)) - np.repeat(starts, sizes)
    first = np.argsort(place >= fewest, kind="stable")  # those that stay come first
    return np.sort(rows[first[: max(count, int((place < fewest).sum()))]])
