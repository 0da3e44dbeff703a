"""Limits of what one picture may cost, checked in its header before a pixel is decoded.

A small file can describe gigabytes of pixels or minutes of work: by size, shape, depth, or the
number of scans, tiles or chunks. Each has a limit here, so that decoding any single file stays
below 300 MB and 5 seconds (shown by the catalogue in `torture/bombs.py`).
"""

import io
import struct
from typing import IO, Any, cast

from PIL import Image

from nofuss.data.avif import stream_pixels
from nofuss.data.headers import count_chunks, count_scans, is_tiff, jpeg_blocks, tiff_layout

MAX_FILE = 2**28
"""Largest picture file, in bytes."""
MAX_PIXELS = 80_000_000
MAX_ASPECT = 20
"""Long side over short side: resizing by the short side would make a narrower picture huge."""
MAX_RESIZED = 25_000_000
"""Pixels of a resized picture, for models with inputs of thousands of pixels a side."""
MAX_MEMORY = 250_000_000
"""Bytes for the file, its pixels and the decoder's own buffers together."""
MAX_HEADER = 2**24
"""Bytes ahead of the pixels: comments, profiles, previews."""
MAX_READS = 300_000
"""Reads by a decoder that is written in Python."""
MAX_VISITS = 24_000_000
"""Blocks of 8 × 8 values that all scans of a JPEG visit together."""
MAX_TAGS, MAX_PIECES = 4_096, 2**15
"""Tags of a TIFF; its strips or tiles, or the chunks of a WebP."""

_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}  # bytes a pixel; others 4
# Bytes a pixel that decoders and their wrappers keep beside Pillow's own.
_KEPT = {"WEBP": 12, "AVIF": 12, "HEIF": 12}
_RAW, _OLD_JPEG, _JPEG, _ZSTD = 1, 6, 7, 50000  # compressions of TIFF
_ZSTD_WINDOW = 2**27


class TooMuch(Exception):
    """Raised for a picture that costs too much; `reason` and `detail` as in `PictureError`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Metered:
    """A file that raises `TooMuch` after too many reads, or too many bytes ahead of the pixels."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._read = file, file.read
        # Not through __getattr__: they are called often.
        self.seek, self.tell = file.seek, file.tell
        self.size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._reads, self.ahead = 0, MAX_HEADER

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes, and count them."""
        data = self._read(size)
        self._reads += 1
        self.ahead -= len(data)
        if self._reads > MAX_READS:
            raise TooMuch("too complex", "made of hundreds of thousands of pieces")
        if self.ahead < 0:
            raise TooMuch("too complex", f"over {MAX_HEADER // 2**20} MB ahead of its pixels")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)  # getvalue or fileno, where there is one


def check_start(file: Metered) -> int:
    """Check a file before any decoder reads it; return the bytes needed beside the pixels."""
    head = file.read(12)
    file.seek(0)
    if head[4:8] == b"ftyp":
        file.ahead += 2 * file.size  # AVIF and HEIC: read completely, here and by the decoder
        _check_streams(file)
    if head[:4] == b"RIFF":
        file.ahead += 2 * file.size  # read completely, here and by the decoder
        if count_chunks(file.read(), MAX_PIECES) == MAX_PIECES:
            raise TooMuch("too complex", f"over {MAX_PIECES:,} chunks")
        file.seek(0)
    return _check_tiff(file) if is_tiff(head[:4]) else 0


def check_size(width: int, height: int) -> None:
    """Refuse too many pixels, and pictures that are too narrow."""
    if width * height > MAX_PIXELS:
        raise TooMuch("oversized", f"over {MAX_PIXELS // 10**6} megapixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        shape = f"{width:,} × {height:,} pixels; a side may be {MAX_ASPECT} times the other"
        raise TooMuch("too narrow", shape)


def middle_box(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the part whose short side is resized to `side`.

    That is the whole picture, or the middle of a very narrow one: crops need no more.
    """
    short = min(width, height)
    longest = int(short * max(1.0, min(MAX_ASPECT, MAX_RESIZED / side**2)))
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return left, top, min(width, longest), min(height, longest)


def check_work(image: Image.Image, file: Metered) -> int:
    """Refuse JPEGs with too many scans; return the bytes that decoding needs beside the pixels."""
    file.ahead = 2**63  # what is read from here on are pixels
    if image.format in _KEPT:
        return _KEPT[image.format] * image.width * image.height
    if image.format not in ("JPEG", "MPO"):
        return 0
    blocks = jpeg_blocks(image.width, image.height, getattr(image, "layer", ()))
    scans = _check_scans(file, blocks)
    # A progressive JPEG: the decoder holds all coefficients, 2 bytes each, until the last scan.
    return 2 * 64 * blocks if scans > 1 else 0


def check_memory(
    image: Image.Image, file: Metered, mode: str, *, buffers: int, turned: bool
) -> None:
    """Refuse a picture that takes too much memory when it is decoded and converted to `mode`."""
    stored, wanted = _STORED.get(image.mode, 4), 1 if mode == "L" else 4
    converted = image.mode != mode or "transparency" in image.info
    copy = max(wanted if converted else 0, stored if turned else 0)
    needed = file.size + buffers + image.width * image.height * (stored + copy)
    if needed > MAX_MEMORY:
        sizes = f"{needed // 10**6:,} MB to decode; at most {MAX_MEMORY // 10**6}"
        raise TooMuch("oversized", sizes)


def _check_streams(file: Metered) -> None:
    """Refuse an AVIF whose streams have more pixels than a decoder may make."""
    if file.size > MAX_MEMORY // 4:
        raise TooMuch("oversized", f"over {MAX_MEMORY // 4 // 10**6} MB of AVIF or HEIC")
    try:
        pixels = stream_pixels(file.read())
    except (ValueError, IndexError, struct.error) as error:
        raise TooMuch("too complex", str(error)) from error
    file.seek(0)
    if pixels * _KEPT["AVIF"] > MAX_MEMORY:
        raise TooMuch("oversized", f"{pixels // 10**6:,} megapixels in its streams")


def _check_scans(file: Metered, blocks: int) -> int:
    max_scans = max(1, MAX_VISITS // max(1, blocks))
    file.seek(0)
    scans = count_scans(file.read(), max_scans + 1)
    if scans > max_scans:
        raise TooMuch("too complex", f"over {max_scans:,} scans of {blocks:,} blocks")
    return scans


def _check_tiff(file: Metered) -> int:
    """Refuse too many tiles, strips and tags; return the bytes needed beside the pixels."""
    try:
        layout = tiff_layout(cast(IO[bytes], file), most_tags=MAX_TAGS, most_pieces=MAX_PIECES)
    except ValueError as error:
        raise TooMuch("too complex", str(error)) from error
    except (struct.error, OSError, OverflowError):
        file.seek(0)
        return 0  # truncated, or no TIFF: Pillow reports it
    file.seek(0)
    check_size(max(layout.width, 1), max(layout.height, 1))
    if layout.pieces > MAX_PIECES:
        raise TooMuch("too complex", f"{layout.pieces:,} strips or tiles")
    if layout.piece_bytes > 2 * file.size + 2**20:
        raise TooMuch("too complex", "its strips or tiles overlap")
    if layout.compression in (_OLD_JPEG, _JPEG):
        _check_tiff_scans(file, layout.piece_pixels)
    held = 0 if layout.compression == _RAW else layout.piece_pixels * max(4, layout.sample_bytes)
    buffers = held + 4 * layout.largest_tag
    if buffers > MAX_MEMORY:
        raise TooMuch("oversized", f"{buffers // 10**6:,} MB to decode a strip or tile")
    return buffers + (_ZSTD_WINDOW if layout.compression == _ZSTD else 0)


def _check_tiff_scans(file: Metered, piece_pixels: int) -> None:
    """Refuse too many scans over all JPEGs inside; each visits the blocks of a strip or tile."""
    file.ahead = 2**63
    scans = file.read().count(b"\xff\xda")
    file.seek(0)
    file.ahead = MAX_HEADER
    if scans * 3 * piece_pixels // 64 > 2 * MAX_VISITS:
        raise TooMuch("too complex", f"{scans:,} scans")
