"""Read from an AVIF file how many pixels its decoder will make, which its header need not say.

The size that Pillow reports is a box of the container. The decoder makes what the AV1 streams
inside say, for every item: the picture, its transparency, the tiles of a grid. The bytes come from
outside: sizes are checked before anything is unpacked.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

MOST_ITEMS = 1024
_SEQUENCE_HEADER, _HAS_EXTENSION, _HAS_SIZE = 1, 4, 2


class Box(NamedTuple):
    """A part of the container: its kind, and where its content is in the file."""

    kind: bytes
    start: int
    end: int


def stream_pixels(content: bytes) -> int:
    """Return the pixels of all AV1 streams together; ValueError for what a still does not have."""
    boxes = {box.kind: box for box in _boxes(content, 0, len(content))}
    if b"moov" in boxes:
        raise ValueError("an animation")
    if b"meta" not in boxes:
        return 0  # no picture: Pillow reports it
    inner = {b.kind: b for b in _boxes(content, boxes[b"meta"].start + 4, boxes[b"meta"].end)}
    if b"iloc" not in inner or b"iinf" not in inner:
        return 0
    coded = _coded_items(content, inner[b"iinf"])
    stored = inner.get(b"idat")
    places = _places(content, inner[b"iloc"], stored.start if stored else 0)
    return sum(_largest_frame(data) for item, data in places if item in coded)


def _boxes(content: bytes, start: int, end: int) -> Iterator[Box]:
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", content, start)
        head = 8
        if size == 1 and start + 16 <= end:
            (size,) = struct.unpack_from(">Q", content, start + 8)
            head = 16
        last = end if size == 0 else start + size
        if last < start + head or last > end:
            return  # truncated: Pillow reports it
        yield Box(kind, start + head, last)
        start = last


def _coded_items(content: bytes, box: Box) -> set[int]:
    """Return the numbers of the items that are AV1 streams."""
    skipped, items = 6 if content[box.start] == 0 else 8, set[int]()
    for entry in _boxes(content, box.start + skipped, box.end):
        version = content[entry.start]
        wide = version >= 3
        number = int.from_bytes(content[entry.start + 4 : entry.start + (8 if wide else 6)], "big")
        at = entry.start + (10 if wide else 8)
        if entry.kind == b"infe" and content[at : at + 4] == b"av01":
            items.add(number)
    return items


def _places(content: bytes, box: Box, stored: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each item."""
    at, version = box.start + 4, content[box.start]

    def number(size: int) -> int:
        nonlocal at
        at += size
        if at > box.end:
            raise ValueError("a list of items that is cut off")
        return int.from_bytes(content[at - size : at], "big")

    sizes, more_sizes = number(1), number(1)
    count = number(4 if version == 2 else 2)
    if count > MOST_ITEMS:
        raise ValueError(f"{count:,} items")
    total = 0
    for _ in range(count):
        item = number(4 if version == 2 else 2)
        method = number(2) & 15 if version in (1, 2) else 0
        number(2)  # which file: always this one
        base = number(more_sizes >> 4) + (stored if method == 1 else 0)
        pieces, extents = list[bytes](), number(2)
        if extents > MOST_ITEMS:
            raise ValueError(f"{extents:,} pieces")
        for _ in range(extents):
            if version in (1, 2):
                number(more_sizes & 15)
            offset, length = number(sizes >> 4), number(sizes & 15)
            first = base + offset
            pieces.append(content[first : first + length if length else len(content)])
            total += len(pieces[-1])
            if total > 2 * len(content):
                raise ValueError("items that overlap")
        yield item, b"".join(pieces)


def _largest_frame(data: bytes) -> int:
    """Return the pixels of the largest frame that the sequence headers of a stream allow."""
    at, pixels = 0, 0
    while at < len(data):
        head = data[at]
        at += 2 if head & _HAS_EXTENSION else 1
        size, shift = len(data) - at, 0
        if head & _HAS_SIZE:
            size = 0
            while at < len(data) and shift < 56:
                byte = data[at]
                size |= (byte & 127) << shift
                at, shift = at + 1, shift + 7
                if byte < 128:
                    break
        if head >> 3 & 15 == _SEQUENCE_HEADER:
            pixels = max(pixels, _frame(data[at : at + min(size, 64)]))
        at += size
    return pixels


def _frame(header: bytes) -> int:
    """Return the pixels of a frame by a sequence header (AV1 specification, 5.5.1)."""
    bits, at = int.from_bytes(header, "big"), 8 * len(header)

    def read(count: int) -> int:
        nonlocal at
        at -= count
        if at < 0:
            raise ValueError("a sequence header that is cut off")
        return bits >> at & (1 << count) - 1

    read(4)  # profile, and whether it is a still
    is_reduced = read(1)
    if is_reduced:
        read(5)
    else:
        if read(1):
            raise ValueError("a stream with timing, as in a film")
        has_delay = read(1)
        for _ in range(read(5) + 1):
            read(12)
            if read(5) > 7:
                read(1)
            if has_delay and read(1):
                read(4)
    wide, high = read(4) + 1, read(4) + 1
    if not is_reduced:  # each frame may have a size of its own, up to this many bits
        return int(2**wide * 2**high)
    return (read(wide) + 1) * (read(high) + 1)
