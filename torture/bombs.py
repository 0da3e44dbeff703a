"""Pictures that are small to send and expensive to open, by size, depth, structure.

Most are written by hand, header by header, with claims that no encoder would make.
"""

import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence

from PIL import Image

UPLOAD = 23 * 2**20
"""Bytes of the largest bombs, just below what the page takes."""
SIDE = 8_900
"""Pixels of a side, just below the limit of a picture."""


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return the picture as a file of a format."""
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def zeros(count: int) -> bytes:
    """Return `count` zeros as a zlib stream, made in pieces."""
    packer, piece = zlib.compressobj(9), bytes(2**20)
    parts = [packer.compress(piece) for _ in range(count // len(piece))]
    return b"".join([*parts, packer.compress(bytes(count % len(piece))), packer.flush()])


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    color: int = 2,
    interlaced: bool = False,
    before: bytes = b"",
    pixels: bytes | None = None,
    after: bytes = b"",
) -> bytes:
    """Return a black PNG; `before` and `after` are chunks around its pixels."""
    bits = depth * {0: 1, 2: 3, 3: 1, 6: 4}[color]  # gray, RGB, palette, RGBA
    if pixels is None:  # an interlaced picture has nearly twice as many rows, each with a filter
        rows = height * (1 + (width * bits + 7) // 8) + 2 * height * interlaced
        pixels = chunk(b"IDAT", zeros(rows))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if color == 3 else b""
    parts = (chunk(b"IHDR", header), palette, before, pixels, after, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg(width: int, height: int, mode: str = "RGB", **options: object) -> bytes:
    """Return a JPEG of one colour."""
    return saved(Image.new(mode, (width, height)), "JPEG", **options)


def with_scans(content: bytes, count: int) -> bytes:
    """Return a JPEG with its last scan repeated."""
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * count + b"\xff\xd9"


def segments(body: bytes, count: int) -> bytes:
    """Return a small JPEG with many comments ahead of its pixels."""
    content = jpeg(64, 64)
    comment = b"\xff\xfe" + struct.pack(">H", len(body) + 2) + body
    return content[:2] + comment * count + content[2:]


def tiff(
    width: int,
    height: int,
    data: bytes,
    *,
    compression: int = 8,
    channels: int = 3,
    offsets: Sequence[int] = (8,),
    rows: int | None = None,
    tile: tuple[int, int] | None = None,
) -> bytes:
    """Return a TIFF of strips or tiles at the given offsets; `data` begins at byte 8."""
    counts = [len(data)] * len(offsets)
    tags: Mapping[int, Sequence[int]] = {
        256: [width],
        257: [height],
        258: [8] * channels,
        259: [compression],
        262: [2 if channels == 3 else 1],
        277: [channels],
        **({273: offsets, 278: [rows or height], 279: counts} if tile is None else {}),
        **({322: tile[:1], 323: tile[1:], 324: offsets, 325: counts} if tile else {}),
    }
    entries, extra, at = b"", b"", 8 + len(data)
    for number, values in tags.items():
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            packed, extra = struct.pack("<I", at + 6 + 12 * len(tags) + len(extra)), extra + packed
        entries += struct.pack("<HHI", number, 4, len(values)) + packed
    folder = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", at) + data + folder + extra


def bmp(width: int, height: int, runs: bytes) -> bytes:
    """Return a gray BMP of run lengths."""
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 0, 0)
    start = 14 + len(info) + 1024
    head = b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start)
    return head + info + bytes(1024) + runs


def chatty_gif() -> bytes:
    """Return a GIF with a long comment ahead of its pixels, in blocks of one letter."""
    content = saved(Image.new("P", (64, 64)), "GIF")
    start = 13 + (3 << (content[10] & 7) + 1)  # behind its colour table
    return content[:start] + b"!\xfe" + b"\x01a" * (UPLOAD // 2) + b"\0" + content[start:]


def riff(chunks: bytes) -> bytes:
    """Return a WebP of these chunks."""
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def turned(orientation: int) -> bytes:
    """Return the PNG chunk that turns a picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))


def tags_over_tags(count: int, size: int) -> bytes:
    """Return Exif whose many tags all claim the same bytes."""
    entries = b"".join(struct.pack("<HHII", 40_000 + i, 7, size, 8) for i in range(count))
    return b"II*\0" + struct.pack("<IH", 8, count) + entries + bytes(size)


def lying_avif() -> bytes:
    """Return an AVIF of 30 megapixels whose container says 64 × 48."""
    content = saved(Image.new("RGB", (6_000, 5_000), "teal"), "AVIF", speed=10, quality=40)
    at = content.index(b"ispe") + 8
    return content[:at] + struct.pack(">II", 64, 48) + content[at + 8 :]


BOMBS: dict[str, Callable[[], bytes]] = {
    "PNG, 80,000,000 × 1": lambda: png(80_000_000, 1, depth=1, color=0),
    "PNG, claims 4 gigapixels": lambda: png(65_535, 65_535, pixels=chunk(b"IDAT", zeros(100))),
    "PNG, RGB": lambda: png(SIDE, SIDE),
    "PNG, RGBA in 16 bits": lambda: png(SIDE, SIDE, depth=16, color=6),
    "PNG, gray in 16 bits": lambda: png(SIDE, SIDE, depth=16, color=0),
    "PNG, palette with transparency": lambda: png(
        SIDE, SIDE, color=3, before=chunk(b"tRNS", bytes(256))
    ),
    "PNG, interlaced": lambda: png(SIDE, SIDE, interlaced=True),
    "PNG, turned behind its pixels": lambda: png(7_700, 7_700, after=turned(6)),
    "PNG, pixels without end": lambda: png(100, 100, pixels=chunk(b"IDAT", zeros(2**29))),
    "PNG, text that inflates": lambda: png(
        64, 64, before=chunk(b"zTXt", b"a\0\0" + zeros(2**28)) * 10
    ),
    "PNG, profile that inflates": lambda: png(
        64, 64, before=chunk(b"iCCP", b"a\0\0" + zeros(2**28))
    ),
    "PNG, two million empty chunks": lambda: png(
        64, 64, before=chunk(b"abCd", b"") * (UPLOAD // 12)
    ),
    "PNG, tags over tags": lambda: png(
        64, 64, before=chunk(b"eXIf", tags_over_tags(5_000, UPLOAD - 10**6))
    ),
    "JPEG, 2,500 scans": lambda: with_scans(jpeg(2_000, 2_000, "L", progressive=True), 2_500),
    "JPEG, 50 scans of 30 megapixels": lambda: with_scans(
        jpeg(5_500, 5_500, "L", progressive=True), 50
    ),
    "JPEG, progressive CMYK": lambda: jpeg(SIDE, SIDE, "CMYK", progressive=True, subsampling=0),
    "JPEG, six million comments": lambda: segments(b"", UPLOAD // 4),
    "GIF, a comment a letter at a time": chatty_gif,
    "GIF, 79 megapixels": lambda: saved(Image.new("L", (SIDE, SIDE)), "GIF"),
    "WebP, 79 megapixels": lambda: saved(Image.new("RGB", (SIDE, SIDE)), "WEBP", method=0),
    "WebP, two million chunks": lambda: riff(b"abcd\0\0\0\0" * (UPLOAD // 8)),
    "BMP, runs of one": lambda: bmp(3_400, 3_400, b"\x01\x07" * (UPLOAD // 2)),
    "TIFF, strips over the same bytes": lambda: tiff(
        5_000, 10_000, zeros(15_000) + bytes(2 * 10**7), rows=1, offsets=[8] * 10_000
    ),
    "TIFF, a tile of 4 gigapixels": lambda: tiff(100, 100, zeros(1_000), tile=(65_536, 65_536)),
    "TIFF, two million tiles": lambda: tiff(
        1_400, 1_400, bytes(3), compression=1, tile=(1, 1), offsets=[8] * 1_400**2
    ),
    "TIFF, JPEG of 2,000 scans": lambda: tiff(
        *(2_000, 2_000, with_scans(jpeg(2_000, 2_000, "L", progressive=True), 2_000)),
        compression=7,
        channels=1,
    ),
    "AVIF, larger than it says": lying_avif,
}
"""By name; made only when called, as some take a second."""
