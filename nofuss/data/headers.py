"""Read from JPEG, WebP and TIFF files how much work they are, where Pillow knows only afterwards.

The bytes come from outside: sizes are checked before anything is unpacked.
"""

import math
import re
import struct
from collections.abc import Sequence
from typing import IO, NamedTuple

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # neither stuffing, nor a restart, nor padding
_END, _SCAN, _START, _ALONE = 0xD9, 0xDA, 0xD8, 0x01


def count_scans(content: bytes, most: int) -> int:
    """Count the scans of a JPEG as its decoder will find them; stop at `most`."""
    scans, at = 0, 2
    while scans < most and (marker := _MARKER.search(content, at)):
        at = marker.end()
        kind = content[at - 1]
        if kind == _END:
            break
        scans += kind == _SCAN
        if kind not in (_START, _ALONE):  # all other markers are followed by a length
            at += int.from_bytes(content[at : at + 2], "big")
    return scans


def jpeg_blocks(width: int, height: int, layers: Sequence[tuple[int, int, int, int]]) -> int:
    """Return the number of 8 × 8 blocks in all components; a layer is (number, h, v, table)."""
    across = math.ceil(width / (8 * max([h for _, h, _, _ in layers], default=1) or 8))
    down = math.ceil(height / (8 * max([v for _, _, v, _ in layers], default=1) or 8))
    return across * down * sum([h * v for _, h, v, _ in layers])


def count_chunks(content: bytes, most: int) -> int:
    """Count the chunks of a WebP; stop at `most`."""
    chunks, at = 0, 12
    while chunks < most and at + 8 <= len(content):
        chunks += 1
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
    return chunks


class Layout(NamedTuple):
    """How the pixels of a TIFF are stored in its file."""

    width: int
    height: int
    compression: int
    pieces: int
    """Strips or tiles."""
    piece_pixels: int
    """Pixels of the largest piece, as the decoder holds it."""
    sample_bytes: int
    """Bytes a pixel in the file."""
    piece_bytes: int
    """Bytes of all pieces in the file; more than the file where they overlap."""
    largest_tag: int
    """Bytes of the largest tag."""


_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _OFFSETS, _SAMPLES = 256, 257, 258, 259, 273, 277
_ROWS, _COUNTS, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS = (
    278,
    279,
    322,
    323,
    324,
    325,
)
_TYPES = {1: "B", 2: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i", 13: "I", 16: "Q"}
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_WIDTHS |= {16: 8, 17: 8, 18: 8}


def is_tiff(head: bytes) -> bool:
    """Return whether the first four bytes are those of a TIFF."""
    return head[:2] in (b"II", b"MM") and bool({0x2A, 0x2B} & set(head[2:4]))


def tiff_layout(file: IO[bytes], *, most_tags: int, most_pieces: int) -> Layout:
    """Read the first directory of tags as Pillow will; ValueError if it is too large.

    If a tag occurs twice, the larger value counts: decoders differ in which they use.
    """
    file.seek(0)
    head = file.read(16)
    if head[:4] == b"MM\0+":  # Pillow and libtiff read these differently
        raise ValueError("a large TIFF in big-endian order")
    order, large = "<" if head[:2] == b"II" else ">", head[2] == 0x2B
    number, entry, inline = ("Q", "HHQ8s", 8) if large else ("H", "HHI4s", 4)
    place = struct.unpack_from(f"{order}{'Q' if large else 'I'}", head, 8 if large else 4)[0]
    file.seek(place)
    (count,) = struct.unpack(f"{order}{number}", file.read(struct.calcsize(number)))
    if count > most_tags:
        raise ValueError(f"{count:,} tags")
    folder = file.read(count * struct.calcsize(f"={entry}"))
    values_of: dict[int, list[int]] = {}
    largest = 0
    for tag, kind, length, raw in struct.iter_unpack(f"{order}{entry}", folder):
        size = length * _WIDTHS.get(kind, 0)
        largest = max(largest, size)
        if tag not in _NEEDED or kind not in _TYPES:
            continue
        if length > most_pieces:
            raise ValueError(f"{length:,} strips or tiles")
        if size > inline:
            file.seek(struct.unpack(f"{order}{'Q' if large else 'I'}", raw)[0])
            raw = file.read(size)
        values = struct.unpack_from(f"{order}{length}{_TYPES[kind]}", raw)
        values_of.setdefault(tag, []).extend(values)
    return _layout(values_of, largest)


_NEEDED = {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _OFFSETS, _SAMPLES, _ROWS, _COUNTS}
_NEEDED |= {_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS}


def _layout(found: dict[int, list[int]], largest: int) -> Layout:
    def most(tag: int, default: int) -> int:
        return max(found.get(tag, ()), default=default)

    width, height = most(_WIDTH, 0), most(_HEIGHT, 0)
    rows = min(most(_ROWS, height), height)
    tile = most(_TILE_WIDTH, 0) * most(_TILE_HEIGHT, 0)
    return Layout(
        width,
        height,
        most(_COMPRESSION, 1),
        max(len(found.get(_OFFSETS, ())), len(found.get(_TILE_OFFSETS, ()))),
        max(tile, width * rows if _OFFSETS in found else 0),
        max(1, most(_SAMPLES, 1) * most(_BITS, 1) // 8),
        max(sum(found.get(_COUNTS, ())), sum(found.get(_TILE_COUNTS, ()))),
        largest,
    )
