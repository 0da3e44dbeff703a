"""Write picture files by hand, header by header, with claims that no encoder would make."""

import io
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from PIL import Image

Tag = tuple[int, Sequence[int] | bytes]
"""A TIFF type (1 byte, 2 text, 3 short, 4 long, 7 raw) and its values."""

GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6
"""Colour types of PNG."""
_CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGBA: 4}
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


def zeros(count: int, *, period: bytes = b"\0") -> bytes:
    """Return `count` repeating bytes as a zlib stream, made in pieces."""
    packer = zlib.compressobj(9)
    piece = period * max(1, 2**20 // len(period))
    whole, rest = divmod(count, len(piece))
    parts = [packer.compress(piece) for _ in range(whole)]
    return b"".join([*parts, packer.compress(piece[:rest]), packer.flush()])


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    color: int = RGB,
    interlaced: bool = False,
    before: bytes = b"",
    pixels: bytes | None = None,
    row_filter: int = 0,
    after: bytes = b"",
) -> bytes:
    """Return a black PNG; `before` are chunks ahead of the pixels, `pixels` other IDAT chunks."""
    bits = depth * _CHANNELS[color]

    def rows(w: int, h: int) -> int:
        return h * (1 + (w * bits + 7) // 8) if w and h else 0

    if pixels is None and interlaced:
        steps = ((-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in _ADAM7)
        pixels = chunk(b"IDAT", zeros(sum(rows(max(w, 0), max(h, 0)) for w, h in steps)))
    elif pixels is None:
        row = bytes([row_filter]) + bytes(rows(width, 1) - 1)
        pixels = chunk(b"IDAT", zeros(rows(width, height), period=row))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if color == PALETTE else b""
    parts = (chunk(b"IHDR", header), palette, before, pixels, after, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(tags: Mapping[int, Tag], data: bytes, *, order: str = "<") -> bytes:
    """Return a TIFF with one directory of tags; `data` begins at byte 8."""
    sizes = {1: "B", 2: "B", 3: "H", 4: "I", 7: "B"}
    entries, extra = b"", b""
    at = 8 + len(data) + len(data) % 2
    beyond = at + 2 + 12 * len(tags) + 4
    for number, (kind, values) in sorted(tags.items()):
        packed = (
            values
            if isinstance(values, bytes)
            else struct.pack(f"{order}{len(values)}{sizes[kind]}", *values)
        )
        entries += struct.pack(f"{order}HHI", number, kind, len(values))
        if len(packed) <= 4:
            entries += packed.ljust(4, b"\0")
        else:
            entries += struct.pack(f"{order}I", beyond + len(extra))
            extra += packed + b"\0" * (len(packed) % 2)
    mark = b"II*\0" if order == "<" else b"MM\0*"
    folder = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return mark + struct.pack(f"{order}I", at) + data + b"\0" * (len(data) % 2) + folder + extra


def tiff_picture(
    width: int,
    height: int,
    data: bytes,
    *,
    compression: int = 8,
    bits: Sequence[int] = (8, 8, 8),
    photometric: int = 2,
    tile: tuple[int, int] | None = None,
    offsets: Sequence[int] = (8,),
    counts: Sequence[int] | None = None,
    rows: int | None = None,
    more: Mapping[int, Tag] | None = None,
) -> bytes:
    """Return a TIFF of strips or tiles with given offsets in the file."""
    counts = counts or [len(data)] * len(offsets)
    tags: dict[int, Tag] = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, bits),
        259: (3, [compression]),
        262: (3, [photometric]),
        277: (3, [len(bits)]),
    }
    if len(bits) == 4 and photometric == 2:
        tags[338] = (3, [2])  # the fourth is transparency
    if tile is None:
        tags |= {273: (4, offsets), 278: (4, [rows or height]), 279: (4, counts)}
    else:
        tags |= {322: (4, [tile[0]]), 323: (4, [tile[1]]), 324: (4, offsets), 325: (4, counts)}
    return tiff(tags | dict(more or {}), data)


def bmp(width: int, height: int, data: bytes, *, bits: int = 24, compression: int = 0) -> bytes:
    """Return a BMP; with 8 bits or fewer it has a gray palette."""
    palette = b"".join(bytes([i, i, i, 0]) for i in range(2**bits)) if bits <= 8 else b""
    start = 14 + 40 + len(palette)
    info = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, 0, 0
    )
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + palette + data


def gif(width: int, height: int, *, before: bytes = b"", frames: Iterable[bytes] = ()) -> bytes:
    """Return a GIF with one colour table; by default with one frame of zeros."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + bytes(range(256)) * 3
    return head + before + b"".join(frames or [gif_frame(width, height)]) + b";"


def gif_frame(width: int, height: int, *, at: tuple[int, int] = (0, 0), most: int = 2**62) -> bytes:
    """Return a frame of zeros in the longest codes: 4,096 entries, then a reset."""
    count, codes = width * height, bytearray()
    held, room = 256, 9  # a clear code first

    def put(code: int, bits: int) -> None:
        nonlocal held, room
        held |= code << room
        room += bits
        while room >= 8:
            codes.append(held & 255)
            held >>= 8
            room -= 8

    written = 0
    while written < min(count, most):
        put(0, 9)  # then each code is a run that is one longer than the last
        written, bits = written + 1, 9
        for run in range(2, 4096 - 257):
            if written >= count:
                break
            code = 258 + run - 2
            bits = 9 if code < 512 else 10 if code < 1024 else 11 if code < 2048 else 12
            put(code, bits)
            written += run
        put(256, bits)
    put(257, 9)
    put(0, 7)
    blocks = b"".join(
        bytes([len(codes[i : i + 255])]) + codes[i : i + 255] for i in range(0, len(codes), 255)
    )
    place = struct.pack("<HHHHB", *at, width, height, 0)
    return b"," + place + b"\x08" + blocks + b"\0"


def vp8l(width: int, height: int) -> bytes:
    """Return pixels of one colour in lossless WebP: about 30 bytes, no bits for a pixel."""
    bits = f"{width - 1:014b}"[::-1] + f"{height - 1:014b}"[::-1] + "0" + "000"
    bits += "0" + "0" + "0"  # no transform, no colour cache, no groups of codes
    bits += ("1" + "0" + "1" + "00000000") * 4 + "1" + "0" + "0" + "0"  # one symbol each
    packed = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    return riff_chunk(b"VP8L", b"\x2f" + packed + bytes(8))


def riff_chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a WebP."""
    return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def webp(*chunks: bytes) -> bytes:
    """Return a WebP of these chunks."""
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, flags: int) -> bytes:
    """Return the VP8X chunk; flags: 2 animation, 4 XMP, 8 Exif, 16 alpha."""
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + size)


def webp_frame(width: int, height: int) -> bytes:
    """Return an ANMF chunk with a frame at the corner."""
    place = bytes(6) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return riff_chunk(b"ANMF", place + struct.pack("<I", 40)[:3] + b"\0" + vp8l(width, height))


def jpeg(width: int, height: int, mode: str = "RGB", **options: object) -> bytes:
    """Return a JPEG of one colour, written by Pillow."""
    return saved(
        Image.new(mode, (width, height), "gray" if mode != "CMYK" else 0), "JPEG", **options
    )


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return the picture as a file of a format."""
    with io.BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def with_scans(content: bytes, count: int) -> bytes:
    """Return a JPEG with its last scan repeated."""
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + scan * count + b"\xff\xd9"


def after_start(content: bytes, segments: bytes) -> bytes:
    """Return a JPEG with segments inserted after its first marker."""
    return content[:2] + segments + content[2:]


def segment(marker: int, body: bytes) -> bytes:
    """Return a JPEG segment with its length."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def exif(entries: int, size: int) -> bytes:
    """Return an Exif block whose many tags all claim the same bytes."""
    folder = struct.pack("<H", entries)
    folder += b"".join(struct.pack("<HHII", 40_000 + i, 7, size, 8) for i in range(entries))
    return b"II*\0" + struct.pack("<I", 8) + folder + bytes(max(0, size - len(folder)))


def saved_exif(orientation: int) -> bytes:
    """Return an Exif block with the orientation of the picture."""
    found = Image.Exif()
    found[0x0112] = orientation
    return found.tobytes().removeprefix(b"Exif\0\0")
