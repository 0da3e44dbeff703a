"""What one picture may cost: known from its header, before a pixel is decoded.

A few bytes can stand for gigabytes of pixels or minutes of work: by size, by shape, by depth, by
the number of scans, tiles or chunks. Each has a limit here, so that decoding any single file stays
below 300 MB and 5 seconds (`torture/bombs.py` is the catalogue that shows it).
"""

import io
import struct
from typing import IO, Any, cast

from PIL import Image

from nofuss.data.headers import count_chunks, count_scans, is_tiff, jpeg_blocks, tiff_layout

MAX_FILE = 2**28
"""Bytes of a picture file."""
MAX_PIXELS = 80_000_000
MAX_ASPECT = 20
"""Long side over short side: a narrower picture grows without bound when its short side does."""
MAX_RESIZED = 25_000_000
"""Pixels of a resized picture, for models that see pictures of thousands of pixels a side."""
MAX_MEMORY = 250_000_000
"""Bytes that the file, its pixels and what the decoder keeps beside them take together."""
MAX_HEADER = 2**24
"""Bytes ahead of the pixels: comments, profiles, previews."""
MAX_READS = 300_000
"""Times that a decoder written in Python asks for the next bytes."""
MAX_VISITS = 24_000_000
"""Blocks of 8 × 8 values that all scans of a JPEG visit together."""
MAX_TAGS, MAX_PIECES = 4_096, 2**15
"""Tags of a TIFF; its strips or tiles, or the chunks of a WebP."""

_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}  # bytes a pixel; others 4
_WEBP = 12  # bytes a pixel that libwebp and its wrapper keep: two canvases and a copy
_RAW, _OLD_JPEG, _JPEG, _ZSTD = 1, 6, 7, 50000  # compressions of TIFF
_ZSTD_WINDOW = 2**27


class TooMuch(Exception):
    """A picture that would cost too much; `reason` and `detail` as of a `PictureError`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Metered:
    """A file that gives up when it is read in too many pieces, or too much ahead of the pixels."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._read = file, file.read
        self.seek, self.tell = (
            file.seek,
            file.tell,
        )  # not through __getattr__: they are called often
        self.size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._reads, self.ahead = 0, MAX_HEADER

    def read(self, size: int = -1, /) -> bytes:
        """Read on."""
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
    """Look at a file before any decoder does; returns bytes that decoding holds beside pixels."""
    head = file.read(4)
    file.seek(0)
    if head == b"RIFF":
        file.ahead += 2 * file.size  # read whole, here and by the decoder
        if count_chunks(file.read(), MAX_PIECES) == MAX_PIECES:
            raise TooMuch("too complex", f"over {MAX_PIECES:,} chunks")
        file.seek(0)
    return _check_tiff(file) if is_tiff(head) else 0


def check_size(width: int, height: int) -> None:
    """Refuse too many pixels, and shapes that are nearly a line."""
    if width * height > MAX_PIXELS:
        raise TooMuch("oversized", f"over {MAX_PIXELS // 10**6} megapixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        shape = f"{width:,} × {height:,} pixels; a side may be {MAX_ASPECT} times the other"
        raise TooMuch("too narrow", shape)


def middle(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of what is resized so that the short side becomes `side`.

    All of a picture, or the middle of one that is nearly a line: a crop sees no more than that.
    """
    short = min(width, height)
    most = int(short * max(1.0, min(MAX_ASPECT, MAX_RESIZED / side**2)))
    left, top = max(0, width - most) // 2, max(0, height - most) // 2
    return left, top, min(width, most), min(height, most)


def check_work(image: Image.Image, file: Metered) -> int:
    """Refuse JPEGs of too many scans; returns bytes that decoding holds beside the pixels."""
    file.ahead = 2**63  # from here on pixels are read
    if image.format == "WEBP":
        return _WEBP * image.width * image.height
    if image.format not in ("JPEG", "MPO"):
        return 0
    blocks = jpeg_blocks(image.width, image.height, getattr(image, "layer", ()))
    scans = _check_scans(file, blocks)
    return 2 * 64 * blocks if scans > 1 else 0  # all coefficients wait for the last scan


def check_memory(
    image: Image.Image, file: Metered, mode: str, *, beside: int, turned: bool
) -> None:
    """Refuse what takes too much memory on its way to `mode`."""
    stored, wanted = _STORED.get(image.mode, 4), 1 if mode == "L" else 4
    converted = image.mode != mode or "transparency" in image.info
    copy = max(wanted if converted else 0, stored if turned else 0)
    needed = file.size + beside + image.width * image.height * (stored + copy)
    if needed > MAX_MEMORY:
        sizes = f"{needed // 10**6:,} MB to decode; at most {MAX_MEMORY // 10**6}"
        raise TooMuch("oversized", sizes)


def _check_scans(file: Metered, blocks: int) -> int:
    most = max(1, MAX_VISITS // max(1, blocks))
    file.seek(0)
    scans = count_scans(file.read(), most + 1)
    if scans > most:
        raise TooMuch("too complex", f"over {most:,} scans of {blocks:,} blocks")
    return scans


def _check_tiff(file: Metered) -> int:
    """Refuse tiles, strips and tags without bound; returns bytes held beside the pixels."""
    try:
        layout = tiff_layout(cast(IO[bytes], file), most_tags=MAX_TAGS, most_pieces=MAX_PIECES)
    except ValueError as error:
        raise TooMuch("too complex", str(error)) from error
    except (struct.error, OSError, OverflowError):
        file.seek(0)
        return 0  # cut off or no TIFF at all: Pillow says so
    file.seek(0)
    check_size(max(layout.width, 1), max(layout.height, 1))
    if layout.pieces > MAX_PIECES:
        raise TooMuch("too complex", f"{layout.pieces:,} strips or tiles")
    if layout.piece_bytes > 2 * file.size + 2**20:
        raise TooMuch("too complex", "its strips or tiles overlap")
    if layout.compression in (_OLD_JPEG, _JPEG):
        _check_tiff_scans(file, layout.piece_pixels)
    held = 0 if layout.compression == _RAW else layout.piece_pixels * max(4, layout.sample_bytes)
    beside = held + 4 * layout.largest_tag
    if beside > MAX_MEMORY:
        raise TooMuch("oversized", f"{beside // 10**6:,} MB to decode a strip or tile")
    return beside + (_ZSTD_WINDOW if layout.compression == _ZSTD else 0)


def _check_tiff_scans(file: Metered, piece_pixels: int) -> None:
    """Scans of all the JPEGs inside; each visits the blocks of a strip or tile."""
    file.ahead = 2**63
    scans = file.read().count(b"\xff\xda")
    file.seek(0)
    file.ahead = MAX_HEADER
    if scans * 3 * piece_pixels // 64 > 2 * MAX_VISITS:
        raise TooMuch("too complex", f"{scans:,} scans")
