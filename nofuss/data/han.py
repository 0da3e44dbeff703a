"""`han`: Han and Hangul characters, a collection of the size of Stanford Online Products.

22,634 classes in 120,053 pictures: 11,318 classes (59,551 pictures) for training, 11,316 (60,502)
for testing, as in Song et al. 2016. A class is a character, an item its picture in one of nine
typefaces of Debian's packages: gray, white on black, 28 × 28, the ink centred.

Two typefaces whose pictures of a character are nearly equal count as one, a character whose
picture in some typeface is that of another is left out, and one needs five pictures to be chosen.
Which characters are chosen, for which side, and which of their pictures are kept (two at least) is
drawn with a fixed seed. Rendering takes less than a minute and is kept in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import features

from nofuss.data.cache import cache_directory
from nofuss.data.collection import TEST, TRAIN, Collection
from nofuss.data.typefaces import Arrays, Pixels, cached_or, codes_in, draw_in_processes
from nofuss.errors import DataError
from nofuss.files.checksum import digest_of

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
FEWEST_DRAWN, FEWEST_KEPT = 5, 2
"""Pictures of a character before and after some are dropped."""
SEED = 0


@dataclass(frozen=True)
class Shape:
    """How many classes and pictures each side has."""

    classes: dict[str, int]
    pictures: dict[str, int]


PRODUCTS = Shape({TRAIN: 11_318, TEST: 11_316}, {TRAIN: 59_551, TEST: 60_502})
"""Stanford Online Products."""


def open_han() -> Collection:
    """Return the characters, from the cache or rendered now."""
    files = font_files()
    han = cached_or(
        _cache_file(files), ("images", "labels", "codes", "split"), lambda: render(files)
    )
    return Collection(
        name="han",
        layout="Han and Hangul characters",
        kind="images",
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
    """Draw the characters of the blocks in each typeface, and choose classes and pictures."""
    all_codes = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
    codes_of = [all_codes[np.isin(all_codes, list(codes_in(file)))] for file in files]
    jobs = [(file, codes.tolist()) for file, codes in zip(files, codes_of, strict=True)]
    drawn = draw_in_processes(jobs, side=SIDE, size=FONT_SIZE)
    usable = distinct(codes_of, drawn)
    codes = np.concatenate([c[keep] for c, keep in zip(codes_of, usable, strict=True)])
    images = np.concatenate([d[keep] for d, keep in zip(drawn, usable, strict=True)])
    random = np.random.default_rng(seed)
    values, counts = np.unique(codes, return_counts=True)
    candidates = values[counts >= FEWEST_DRAWN]
    wanted = sum(shape.classes.values())
    if len(candidates) < wanted:
        raise DataError(
            f"these typefaces draw only {len(candidates):,} characters in {FEWEST_DRAWN} ways or "
            f"more, and {wanted:,} are needed; install the packages' current versions"
        )
    chosen = random.permutation(candidates)[:wanted]
    sides = np.split(chosen, [shape.classes[TRAIN]])
    rows = [
        _some_pictures(codes, side, shape.pictures[name], random)
        for name, side in zip((TRAIN, TEST), sides, strict=True)
    ]
    order = np.concatenate([r[np.argsort(codes[r], kind="stable")] for r in rows])
    class_codes, labels = np.unique(codes[order], return_inverse=True)
    return {
        "images": images[order],
        "labels": labels.astype(np.int64),
        "codes": class_codes.astype(np.int64),
        "split": np.repeat([TRAIN, TEST], [len(r) for r in rows]),
    }


def distinct(
    codes_of: Sequence[NDArray[np.int64]], drawn: Sequence[Pixels]
) -> list[NDArray[np.bool_]]:
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


def _some_pictures(
    codes: NDArray[np.int64], classes: NDArray[np.int64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return rows of `count` random pictures of these classes, at least two of each."""
    rows = random.permutation(np.flatnonzero(np.isin(codes, classes)))
    order = np.argsort(codes[rows], kind="stable")
    _, starts, sizes = np.unique(codes[rows][order], return_index=True, return_counts=True)
    place = np.empty(len(rows), dtype=np.int64)  # of each picture among those of its class
    place[order] = np.arange(len(rows)) - np.repeat(starts, sizes)
    first = np.argsort(place >= FEWEST_KEPT, kind="stable")  # those that stay come first
    return np.sort(rows[first[: max(count, FEWEST_KEPT * len(classes))]])


def _cache_file(files: Sequence[Path]) -> Path:
    """Return the file named after all that the pictures depend on: fonts, renderer, settings."""
    settings = (SIDE, FONT_SIZE, BLOCKS, ALIKE, FEWEST_DRAWN, FEWEST_KEPT, SEED, PRODUCTS)
    versions = f"1 {settings} {features.version('freetype2')}".encode()
    key = digest_of([versions, *(file.read_bytes() for file in files)], size=8)
    return cache_directory() / f"han-{key}.npz"
