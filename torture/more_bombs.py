"""Bombs in GIF, WebP, BMP and TIFF; `bombs.py` has the others and the list of all."""

import lzma
from collections.abc import Callable

import numpy as np
from PIL import Image

from torture.picture_files import (
    bmp,
    exif,
    gif,
    gif_frame,
    jpeg,
    riff_chunk,
    saved,
    tiff_picture,
    vp8l,
    webp,
    webp_canvas,
    webp_frame,
    with_scans,
    zeros,
)

Make = Callable[[], bytes]
SIDE = 8_900
"""Side of a square picture of 79 megapixels."""
UPLOAD = 24_000_000
"""Most bytes of an upload."""


def gif_bombs() -> dict[str, Make]:
    """Return bombs in GIF."""
    comment = b"!\xfe" + b"\x01a" * (UPLOAD // 2) + b"\0"
    clear = b"!\xf9\x04\x09\0\0\0\0"
    return {
        "60,000 × 2": lambda: gif(60_000, 2),
        "large": lambda: gif(SIDE, SIDE),
        "transparent": lambda: gif(SIDE, SIDE, before=clear),
        "transparent, 25 megapixels": lambda: gif(5_000, 5_000, before=clear),
        "a screen with little on it": lambda: gif(SIDE, SIDE, frames=[gif_frame(2, 2)]),
        "a frame beyond the screen": lambda: gif(
            2, 2, frames=[gif_frame(SIDE, SIDE, at=(60_000, 60_000), most=10)]
        ),
        "thousands of frames": lambda: gif(
            5_000, 5_000, frames=[gif_frame(5_000, 5_000), *[gif_frame(2, 2)] * 20_000]
        ),
        "a comment a letter at a time": lambda: gif(64, 64, before=comment),
        "a million comments": lambda: gif(64, 64, before=b"!\xfe\x01a\0" * (UPLOAD // 5)),
        "a million extensions": lambda: gif(64, 64, before=b"!\x77\0" * (UPLOAD // 3)),
    }


def webp_bombs() -> dict[str, Make]:
    """Return bombs in WebP."""
    noise = np.random.default_rng(0).integers(0, 256, (2_000, 2_000, 3), dtype=np.uint8)
    return {
        "16,000 × 1": lambda: webp(vp8l(16_000, 1)),
        "large": lambda: webp(vp8l(SIDE, SIDE)),
        "20 megapixels": lambda: webp(vp8l(4_470, 4_470)),
        "9 megapixels": lambda: webp(vp8l(3_000, 3_000)),
        "lossy noise": lambda: saved(Image.fromarray(noise), "WEBP", quality=100),
        "lossless noise": lambda: saved(Image.fromarray(noise), "WEBP", lossless=True, method=0),
        "claims 268 megapixels": lambda: webp(vp8l(16_384, 16_384)),
        "a canvas with little on it": lambda: webp(
            webp_canvas(SIDE, SIDE, 2), riff_chunk(b"ANIM", bytes(6)), webp_frame(2, 2)
        ),
        "a canvas without end": lambda: webp(
            webp_canvas(2**24, 255, 2), riff_chunk(b"ANIM", bytes(6)), webp_frame(2, 2)
        ),
        "thousands of frames": lambda: webp(
            webp_canvas(3_000, 3_000, 2),
            riff_chunk(b"ANIM", bytes(6)),
            webp_frame(3_000, 3_000) * 20_000,
        ),
        "moving and large": lambda: webp(
            webp_canvas(SIDE, SIDE, 18),
            riff_chunk(b"ANIM", bytes(6)),
            webp_frame(SIDE, SIDE) * 3,
        ),
        "a million chunks": lambda: webp(
            webp_canvas(64, 64, 0), riff_chunk(b"abcd", b"") * (UPLOAD // 8), vp8l(64, 64)
        ),
        "tags over tags": lambda: webp(
            webp_canvas(64, 64, 8),
            vp8l(64, 64),
            riff_chunk(b"EXIF", exif(5_000, UPLOAD - 10**6)),
        ),
    }


def bmp_bombs() -> dict[str, Make]:
    """Return bombs in BMP."""
    return {
        "60,000 × 1": lambda: bmp(60_000, 1, bytes(180_000)),
        "large": lambda: bmp(SIDE, SIDE, bytes(3 * SIDE * SIDE)),
        "large, 1 bit": lambda: bmp(SIDE, SIDE, bytes(SIDE * (SIDE // 32 + 1) * 4), bits=1),
        "claims a gigapixel": lambda: bmp(30_000, 30_000, bytes(100)),
        "runs of one": lambda: bmp(
            3_400, 3_400, b"\x01\x07" * (UPLOAD // 2), bits=8, compression=1
        ),
        "runs of 255": lambda: bmp(SIDE, SIDE, b"\xff\x07" * 320_000, bits=8, compression=1),
        "jumps": lambda: bmp(
            SIDE, SIDE, b"\x00\x02\xff\xff" * (UPLOAD // 4), bits=8, compression=1
        ),
        "ends of lines": lambda: bmp(5_000, 5_000, b"\0\0" * (UPLOAD // 2), bits=8, compression=1),
    }


def tiff_bombs() -> dict[str, Make]:
    """Return bombs in TIFF."""
    line = zeros(3 * 5_000)
    huge_dictionary = lzma.compress(
        bytes(10**6),
        lzma.FORMAT_XZ,
        filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**20, "preset": 0}],
    )
    flat = jpeg(2_000, 2_000, "L", progressive=True)
    return {
        "50,000 × 1": lambda: tiff_picture(50_000, 1, zeros(150_000)),
        "deflate": lambda: tiff_picture(SIDE, SIDE, zeros(3 * SIDE * SIDE)),
        "deflate, 50 megapixels": lambda: tiff_picture(7_000, 7_000, zeros(3 * 7_000 * 7_000)),
        "RGBA": lambda: tiff_picture(5_500, 5_500, zeros(4 * 5_500**2), bits=(8,) * 4),
        "16 bits": lambda: tiff_picture(
            SIDE, SIDE, zeros(2 * SIDE * SIDE), bits=(16,), photometric=1
        ),
        "32 bits": lambda: tiff_picture(
            SIDE, SIDE, zeros(4 * SIDE * SIDE), bits=(32,), photometric=1
        ),
        "floats": lambda: tiff_picture(
            SIDE,
            SIDE,
            zeros(4 * SIDE * SIDE),
            bits=(32,),
            photometric=1,
            more={339: (3, [3])},
        ),
        "CMYK": lambda: tiff_picture(
            5_500, 5_500, zeros(4 * 5_500**2), bits=(8,) * 4, photometric=5
        ),
        "a tile larger than the picture": lambda: tiff_picture(
            100, 100, zeros(10**6), tile=(20_000, 20_000)
        ),
        "a tile of 4 gigapixels": lambda: tiff_picture(
            100, 100, zeros(1_000), tile=(65_536, 65_536)
        ),
        "a strip larger than the picture": lambda: tiff_picture(100, 100, zeros(10**8), rows=2**31),
        "two million tiles of a pixel": lambda: tiff_picture(
            1_400,
            1_400,
            bytes(3),
            compression=1,
            tile=(1, 1),
            offsets=[8] * 1_400**2,
            counts=[3] * 1_400**2,
        ),
        "strips over the same bytes": lambda: tiff_picture(
            5_000,
            10_000,
            line + bytes(2 * 10**7),
            rows=1,
            offsets=[8] * 10_000,
            counts=[2 * 10**7] * 10_000,
        ),
        "JPEG of 2,000 scans": lambda: tiff_picture(
            2_000, 2_000, with_scans(flat, 2_000), compression=7, bits=(8,), photometric=1
        ),
        "strips of one slow JPEG": lambda: tiff_picture(
            2_000,
            2_000 * 16,
            with_scans(flat, 30),
            compression=7,
            bits=(8,),
            photometric=1,
            rows=2_000,
            offsets=[8] * 16,
        ),
        "LZMA with a large dictionary": lambda: tiff_picture(
            500, 500, huge_dictionary, compression=34925
        ),
        "oriented": lambda: tiff_picture(5_500, 5_500, zeros(3 * 5_500**2), more={274: (3, [6])}),
        "tags over tags": lambda: tiff_picture(
            64,
            64,
            zeros(3 * 64 * 64) + bytes(UPLOAD),
            more={40_000 + i: (7, bytes(5)) for i in range(2_000)},
        ),
        "lines without end": lambda: tiff_picture(
            5_000, 5_000, bytes(UPLOAD), compression=4, bits=(1,), photometric=0
        ),
        "PackBits of nothing": lambda: tiff_picture(
            5_000, 5_000, b"\x80" * UPLOAD, compression=32773
        ),
    }
