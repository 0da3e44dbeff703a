"""The built-in data set: characters in the typefaces that ship with matplotlib.

1,446 characters (letters and digits of at least twelve typefaces) in 19,581 pictures: 540 in all
sixteen typefaces, 863 in the twelve of DejaVu alone. 723 classes (9,808 pictures) are for
training, 723 (9,773) for testing; the nearest neighbour by raw pixels is of the same character
for 52 % of the test pictures.

A class is a character, an item its picture in one typeface: gray, white on black, 28 × 28,
the ink centred. Homoglyphs (Latin A, Greek Α, Cyrillic А) are one class, named after the first of
them, with one picture per typeface: otherwise copies would be nearest neighbours (51 remain, where
typefaces share a glyph such as ℂ). Half of the classes, drawn with a fixed seed, are for
testing only. Nothing is downloaded; rendering takes a few seconds and is kept in the cache.
"""

import io
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFont, features

from nofuss.cache import blob, name_of
from nofuss.data.collection import TEST, TRAIN, Collection

Pixels = NDArray[np.uint8]
"""(N, side, side), white on black."""
Arrays = dict[str, NDArray[Any]]

SIDE = 28
FONT_SIZE = 20
"""Pixels per em: capitals with two accents still fit into 28 rows."""
FEWEST_FACES = 12
FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
SAME = 0.005
"""Two pictures have the same shape if they differ by less than this fraction of their ink."""
SPLIT_SEED = 0


def open_glyphs() -> Collection:
    """Return the built-in characters, from the cache or rendered now."""
    settings = (SIDE, FONT_SIZE, FEWEST_FACES, FACES, SAME, unicodedata.unidata_version)
    glyphs = drawn_once("characters", settings, map(_font_file, FACES), render)
    names = tuple(chr(code) for code in glyphs["codes"])
    held_out = np.zeros(len(names), dtype=bool)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    held_out[order[: len(names) // 2]] = True
    return Collection(
        name="characters",
        layout="built-in characters",
        array=glyphs["images"],
        labels=glyphs["labels"],
        class_names=names,
        split=np.where(held_out[glyphs["labels"]], TEST, TRAIN),
    )


def render() -> Arrays:
    """Draw every character of at least twelve typefaces, and merge the homoglyphs."""
    codes_of = {face: _alphanumeric(face) for face in FACES}
    faces_of = Counter(code for codes in codes_of.values() for code in codes)
    codes = np.array(sorted(c for c, count in faces_of.items() if count >= FEWEST_FACES))
    places, pictures = [], []
    for face in FACES:
        place = np.flatnonzero(np.isin(codes, list(codes_of[face])))
        places.append(place)
        pictures.append(draw(_font_file(face), codes[place].tolist(), side=SIDE, size=FONT_SIZE))
    parent = _merge_homoglyphs(places, pictures, len(codes))
    kept = [np.unique(parent[place], return_index=True) for place in places]
    labels = np.concatenate([parents for parents, _ in kept])
    images = np.concatenate([p[first] for p, (_, first) in zip(pictures, kept, strict=True)])
    order = np.argsort(labels, kind="stable")
    parents, compact = np.unique(labels[order], return_inverse=True)
    return {
        "images": images[order],
        "labels": compact.astype(np.int64),
        "codes": codes[parents].astype(np.int64),
    }


def _font_file(face: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _alphanumeric(face: str) -> set[int]:
    """Return the letters and digits in the character map of a typeface."""
    return {code for code in codes_in(_font_file(face)) if chr(code).isalnum()}


def _merge_homoglyphs(
    places: list[NDArray[np.int64]], pictures: list[NDArray[np.uint8]], count: int
) -> NDArray[np.int64]:
    """Return for each character the first one that looks the same in half of their common faces."""
    same = np.zeros((count, count), dtype=np.int16)
    drawn_in = np.zeros((count, len(places)), dtype=np.float32)
    for face, (place, drawn) in enumerate(zip(places, pictures, strict=True)):
        x = drawn.reshape(len(drawn), -1).astype(np.float32) / 255
        ink = np.square(x).sum(axis=1)
        squared = ink[:, None] + ink - 2 * x @ x.T
        rows, columns = np.nonzero(squared < SAME * np.minimum(ink[:, None], ink))
        same[place[rows], place[columns]] += 1
        drawn_in[place, face] = 1
    shared = np.maximum(drawn_in @ drawn_in.T, 1)
    from scipy.sparse.csgraph import connected_components

    _, group = connected_components(2 * same >= shared, directed=False)
    _, first = np.unique(group, return_index=True)
    return np.asarray(first[group], dtype=np.int64)


def codes_in(file: Path) -> set[int]:
    """Return the characters in the character map of a font file; of a collection, its first."""
    from matplotlib.ft2font import FT2Font

    return set(FT2Font(str(file)).get_charmap())


def draw(file: Path, codes: Sequence[int], *, side: int, size: int) -> Pixels:
    """Draw characters with `size` pixels per em, smaller where they would not fit, ink centred."""
    fonts: dict[int, ImageFont.FreeTypeFont] = {}
    pictures = np.zeros((len(codes), side, side), dtype=np.uint8)
    for i, code in enumerate(codes):
        for em in range(size, 0, -1):  # the few widest letters need a smaller size
            if em not in fonts:
                basic = ImageFont.Layout.BASIC  # the same with and without libraqm
                fonts[em] = ImageFont.truetype(file, em, layout_engine=basic)
            mask = fonts[em].getmask(chr(code), mode="L", anchor="ls")
            width, height = mask.size
            if max(width, height) <= side:
                break
        left, top = (side - width) // 2, (side - height) // 2
        ink = np.frombuffer(bytes(mask), dtype=np.uint8).reshape(height, width)
        pictures[i, top : top + height, left : left + width] = ink
    return pictures


def drawn_once(
    kind: str, settings: object, fonts: Iterable[Path], render: Callable[[], Arrays]
) -> Arrays:
    """Return what `render` draws with these settings and fonts, from the cache or now."""
    made_of = f"{settings} {features.version('freetype2')}".encode()
    name = name_of(kind, made_of, *(font.read_bytes() for font in fonts))

    def packed() -> bytes:
        with io.BytesIO() as file:
            np.savez_compressed(file, allow_pickle=False, **render())
            return file.getvalue()

    with np.load(io.BytesIO(blob(name, packed)), allow_pickle=False) as arrays:
        return dict(arrays)
