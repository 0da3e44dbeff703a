"""Pictures that are small to send and expensive to open: a catalogue of all formats.

The formats that are opened get bombs of their own, by size, shape, depth, structure and
metadata; every other format that Pillow knows how to write gets one, to be refused unread.
"""

import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from torture.avif_bombs import avif_at_the_limit, avif_bombs
from torture.more_bombs import SIDE, UPLOAD, Make, bmp_bombs, gif_bombs, tiff_bombs, webp_bombs
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
            64, 64, before=chunk(b"zTXt", b"a\0\0" + zeros(2**28)) * 10
        ),
        "much text": lambda: png(64, 64, before=many(b"tEXt", b"k\0" + bytes(999_000), 10**6)),
        "profile that inflates": lambda: png(
            64, 64, before=chunk(b"iCCP", b"a\0\0" + zeros(2**28))
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
    """Return scans that change every coefficient, as many as fit into an upload."""
    noise = np.random.default_rng(0).integers(0, 256, (500, 500), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), "JPEG", progressive=True, quality=95)
    scan = len(whole) - whole.rindex(b"\xff\xda")
    return with_scans(whole, UPLOAD // scan - 10)


def _at_the_limit() -> dict[str, Make]:
    """Return pictures at the limits, each decoded in a different way."""
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
    """Return a picture of every other format that Pillow writes."""
    image = Image.new("RGB", (256, 256), "gray")
    modes = {"BLP": "P", "MSP": "1", "XBM": "1", "SPIDER": "F", "FITS": "L", "GBR": "L"}
    kinds = (
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
    """Return every bomb by a name such as "PNG, 2,000 × 1"."""
    made = {
        "PNG": _png(),
        "JPEG": _jpeg(),
        "GIF": gif_bombs(),
        "WebP": webp_bombs(),
        "BMP": bmp_bombs(),
        "AVIF": avif_bombs(),
    }
    made |= {
        "TIFF": tiff_bombs(),
        "at the limit": _at_the_limit() | avif_at_the_limit(),
        "another format": _others(),
    }
    return {f"{form}, {name}": make for form, each in made.items() for name, make in each.items()}
