"""Pictures that are small to send and dear to open: a catalogue over every format.

The six formats that are opened get bombs of their own, by size, shape, depth, structure and
metadata; every other format that Pillow knows how to write gets one, to be refused unread.
"""

import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from torture.picture_files import (
    GRAY,
    GRAY_ALPHA,
    PALETTE,
    RGBA,
    after_start,
    bmp,
    chunk,
    exif,
    gif,
    gif_frame,
    jpeg,
    png,
    riff_chunk,
    saved,
    saved_exif,
    segment,
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
"""A side of pictures of 79 megapixels: just under what was once the only limit."""
UPLOAD = 24_000_000
"""Bytes that the page takes at most."""


def _png() -> dict[str, Make]:
    def many(kind: bytes, body: bytes, size: int) -> bytes:
        return chunk(kind, body) * (UPLOAD // size)

    return {
        "2,000 × 1": lambda: png(2_000, 1),
        "20,000 × 1": lambda: png(20_000, 1, color=GRAY),
        "1 × 20,000": lambda: png(1, 20_000, color=RGBA),
        "80,000,000 × 1": lambda: png(80_000_000, 1, color=GRAY, depth=1),
        "1 bit": lambda: png(SIDE, SIDE, depth=1, color=GRAY),
        "gray": lambda: png(SIDE, SIDE, color=GRAY),
        "RGB": lambda: png(SIDE, SIDE),
        "RGB, 60 megapixels": lambda: png(7_700, 7_700),
        "RGB, every row filtered": lambda: png(7_700, 7_700, row_filter=4),
        "RGBA": lambda: png(SIDE, SIDE, color=RGBA),
        "RGBA, 30 megapixels": lambda: png(5_500, 5_500, color=RGBA),
        "gray with transparency": lambda: png(SIDE, SIDE, color=GRAY_ALPHA),
        "palette with transparency": lambda: png(
            SIDE, SIDE, color=PALETTE, before=chunk(b"tRNS", bytes(256))
        ),
        "gray with a clear shade": lambda: png(
            SIDE, SIDE, color=GRAY, before=chunk(b"tRNS", bytes(2))
        ),
        "16 bits gray": lambda: png(SIDE, SIDE, depth=16, color=GRAY),
        "16 bits RGB": lambda: png(SIDE, SIDE, depth=16),
        "16 bits RGBA": lambda: png(SIDE, SIDE, depth=16, color=RGBA),
        "interlaced": lambda: png(SIDE, SIDE, interlaced=True),
        "interlaced, 60 megapixels": lambda: png(7_700, 7_700, interlaced=True),
        "claims 4 gigapixels": lambda: png(65_535, 65_535, pixels=chunk(b"IDAT", zeros(100))),
        "pixels without end": lambda: png(100, 100, pixels=chunk(b"IDAT", zeros(2**29))),
        "text that inflates": lambda: png(
            64, 64, before=chunk(b"zTXt", b"a\0\0" + zeros(2**30)) * 10
        ),
        "much text": lambda: png(64, 64, before=many(b"tEXt", b"k\0" + bytes(999_000), 10**6)),
        "profile that inflates": lambda: png(
            64, 64, before=chunk(b"iCCP", b"a\0\0" + zeros(2**30))
        ),
        "a million empty chunks": lambda: png(64, 64, before=many(b"abCd", b"", 12)),
        "a million empty pixel chunks": lambda: png(64, 64, pixels=many(b"IDAT", b"", 12)),
        "unknown chunks": lambda: png(64, 64, before=chunk(b"abCd", bytes(UPLOAD))),
        "tags over tags": lambda: png(64, 64, before=chunk(b"eXIf", exif(5_000, UPLOAD - 10**6))),
        "tags in text": lambda: png(
            64,
            64,
            before=chunk(
                b"zTXt",
                b"Raw profile type exif\0\0"
                + zlib.compress(b"\nexif\n 1\n" + exif(20_000, 240_000).hex().encode()),
            ),
        ),
        "many frames": lambda: png(
            7_700,
            7_700,
            before=chunk(b"acTL", struct.pack(">II", 10_000, 0))
            + chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 7_700, 7_700, 0, 0, 1, 1, 1, 0)),
        ),
    }


def _jpeg() -> dict[str, Make]:
    flat = jpeg(2_000, 2_000, "L", progressive=True)
    big: dict[str, Any] = {"progressive": True, "subsampling": 0}
    return {
        "60,000 × 10": lambda: jpeg(60_000, 10),
        "RGB": lambda: jpeg(SIDE, SIDE),
        "CMYK": lambda: jpeg(SIDE, SIDE, "CMYK"),
        "progressive": lambda: jpeg(SIDE, SIDE, progressive=True),
        "progressive, all colours": lambda: jpeg(SIDE, SIDE, **big),
        "progressive, CMYK": lambda: jpeg(SIDE, SIDE, "CMYK", **big),
        "progressive, 40 megapixels": lambda: jpeg(6_300, 6_300, **big),
        "2,500 scans": lambda: with_scans(flat, 2_500),
        "50 scans of 30 megapixels": lambda: with_scans(
            jpeg(5_500, 5_500, "L", progressive=True), 50
        ),
        "50,000 scans of 200 × 200": lambda: with_scans(
            jpeg(200, 200, "L", progressive=True), 50_000
        ),
        "scans over noise": lambda: _scans_over_noise(),
        "sequential, 500 scans": lambda: with_scans(jpeg(2_000, 2_000, "L"), 500),
        "arithmetic code, progressive": lambda: with_scans(flat, 500).replace(
            b"\xff\xc2", b"\xff\xca", 1
        ),
        "lossless": lambda: jpeg(SIDE, SIDE).replace(b"\xff\xc0", b"\xff\xc3", 1),
        "millions of segments": lambda: after_start(
            jpeg(64, 64), segment(0xFE, b"") * (UPLOAD // 4)
        ),
        "millions of pad bytes": lambda: after_start(jpeg(64, 64), b"\xff" * UPLOAD),
        "Exif in pieces": lambda: after_start(
            jpeg(64, 64),
            segment(0xE1, b"Exif\0\0" + exif(5_000, 65_000)[:65_000])
            + segment(0xE1, b"Exif\0\0" + bytes(65_000)) * (UPLOAD // 65_100),
        ),
        "tags over tags": lambda: after_start(
            jpeg(64, 64), segment(0xE1, b"Exif\0\0" + exif(5_000, 60_100)[:65_000])
        ),
        "many pictures (MPO)": lambda: saved(
            Image.new("RGB", (6_000, 6_000)),
            "MPO",
            save_all=True,
            append_images=[Image.new("RGB", (6_000, 6_000))] * 3,
        ),
        "padded": lambda: jpeg(64, 64) + bytes(UPLOAD),
    }


def _scans_over_noise() -> bytes:
    """Scans that change every coefficient, as many as fit into an upload."""
    noise = np.random.default_rng(0).integers(0, 256, (500, 500), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), "JPEG", progressive=True, quality=95)
    scan = len(whole) - whole.rindex(b"\xff\xda")
    return with_scans(whole, UPLOAD // scan - 10)


def _gif() -> dict[str, Make]:
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


def _webp() -> dict[str, Make]:
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


def _bmp() -> dict[str, Make]:
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


def _tiff() -> dict[str, Make]:
    packed = zeros(3 * SIDE * SIDE)
    line = zeros(3 * 5_000)
    huge_dictionary = lzma.compress(
        bytes(10**6),
        lzma.FORMAT_XZ,
        filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**20, "preset": 0}],
    )
    flat = jpeg(2_000, 2_000, "L", progressive=True)
    scans = with_scans(flat, 2_000)
    return {
        "50,000 × 1": lambda: tiff_picture(50_000, 1, zeros(150_000)),
        "deflate": lambda: tiff_picture(SIDE, SIDE, packed),
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
            100, 100, zeros(3 * 20_000**2), tile=(20_000, 20_000)
        ),
        "a tile of 4 gigapixels": lambda: tiff_picture(
            100, 100, zeros(1_000), tile=(65_536, 65_536)
        ),
        "a strip larger than the picture": lambda: tiff_picture(100, 100, zeros(10**9), rows=2**31),
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
            2_000, 2_000, scans, compression=7, bits=(8,), photometric=1
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


def _at_the_limit() -> dict[str, Make]:
    """As large as is let through, each on another way to its pixels."""
    clear = chunk(b"tRNS", bytes(256))
    turned = chunk(b"eXIf", saved_exif(6))
    return {
        "PNG, RGB": lambda: png(7_900, 7_900),
        "PNG, gray": lambda: png(7_050, 7_050, color=GRAY),
        "PNG, palette with transparency": lambda: png(7_050, 7_050, color=PALETTE, before=clear),
        "PNG, gray with transparency": lambda: png(5_580, 5_580, color=GRAY_ALPHA),
        "PNG, 16 bits gray": lambda: png(6_400, 6_400, depth=16, color=GRAY),
        "PNG, 16 bits RGBA": lambda: png(5_580, 5_580, depth=16, color=RGBA),
        "PNG, turned": lambda: png(5_580, 5_580, before=turned),
        "PNG, turned behind its pixels": lambda: png(7_700, 7_700, after=turned),
        "PNG, 20 times as long": lambda: png(25_000, 1_250),
        "JPEG, progressive": lambda: jpeg(6_300, 6_300, progressive=True, subsampling=0),
        "GIF": lambda: gif(7_050, 7_050),
        "WebP": lambda: webp(vp8l(3_900, 3_900)),
        "WebP, moving": lambda: webp(
            webp_canvas(3_500, 3_500, 18),
            riff_chunk(b"ANIM", bytes(6)),
            webp_frame(3_500, 3_500) * 3,
        ),
        "BMP": lambda: bmp(5_900, 5_900, bytes(3 * 5_900 * 5_900 + 5_900 * 4)),
        "TIFF": lambda: tiff_picture(5_580, 5_580, zeros(3 * 5_580**2)),
        "TIFF, tiles": lambda: tiff_picture(256, 256, zeros(3 * 7_000**2), tile=(7_008, 7_008)),
        "TIFF, floats": lambda: tiff_picture(
            4_500, 4_500, zeros(4 * 4_500**2), bits=(32,), photometric=1, more={339: (3, [3])}
        ),
    }


def _others() -> dict[str, Make]:
    """A picture of every other format that Pillow writes."""
    image = Image.new("RGB", (256, 256), "gray")
    modes = {"BLP": "P", "MSP": "1", "XBM": "1", "SPIDER": "F", "FITS": "L", "GBR": "L"}
    kinds = (
        "AVIF",
        "BLP",
        "DDS",
        "EPS",
        "ICNS",
        "ICO",
        "IM",
        "JPEG2000",
        "MPO",
        "MSP",
        "PCX",
        "PDF",
    )
    more = ("PPM", "QOI", "SGI", "SPIDER", "TGA", "XBM")

    def make(kind: str) -> Make:
        return lambda: saved(image.convert(modes.get(kind, "RGB")), kind)

    return {f"{kind}": make(kind) for kind in kinds + more}


def bombs() -> dict[str, Make]:
    """Every bomb by name: "PNG, 2,000 × 1"."""
    made = {"PNG": _png(), "JPEG": _jpeg(), "GIF": _gif(), "WebP": _webp(), "BMP": _bmp()}
    made |= {"TIFF": _tiff(), "at the limit": _at_the_limit(), "another format": _others()}
    return {f"{form}, {name}": make for form, each in made.items() for name, make in each.items()}
