"""Open one picture: upright, in "RGB" or "L", with transparency over white.

Pillow decodes, and recognises a format by content, not by name; of an animation it is the first
frame. Refused are files over MAX_FILE bytes, over MAX_PIXELS pixels, or more than MAX_ASPECT times
as long as wide. JPEGs are decoded at reduced scale where that is enough. A file that was made for
it can still take seconds and a gigabyte: what strangers send is decoded in a process with limits
(`decode_pool.py`).
"""

import base64
import importlib.util
import io
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError, features

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection, printable
from nofuss.data.items import read_item
from nofuss.errors import DataError

MAX_FILE, MAX_PIXELS, MAX_ASPECT = 2**28, 80_000_000, 20
"""Bytes of a file; pixels; long side over short side: resized by its short side, a narrower picture
would be huge."""

READS_AVIF = "avif" in features.modules and bool(features.check_module("avif"))  # Pillow 11.3
READS_HEIF = importlib.util.find_spec("pillow_heif") is not None  # the extra `heif`
FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", *["AVIF"] * READS_AVIF]
FORMATS += ["HEIF"] * READS_HEIF
"""Pillow's names of the formats that are decoded; all others are refused."""
SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SUFFIXES |= {".avif"} if READS_AVIF else set()
SUFFIXES |= {".heic", ".heif"} if READS_HEIF else set()


class PictureError(DataError):
    """A picture that can't be used; `reason` says why in a word or two."""

    def __init__(self, name: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{name}: {reason}" + (f" ({detail})" if detail else ""))
        self.reason, self.detail = reason, detail


def decode(source: Path | bytes, *, mode: str = "RGB", at_least: int = 0) -> Image.Image:
    """Decode the picture at a path, or its content, or raise PictureError.

    at_least: if positive, JPEGs may be decoded at an eighth to a half of their scale, as long as
    no side falls below it.
    """
    name = printable(source) if isinstance(source, Path) else "picture"
    content = b""
    try:
        content = read_item(source, limit=MAX_FILE) if isinstance(source, Path) else source
        _register_heif()
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
        _check_size(name, *image.size)
        if at_least:
            image.draft(None, (at_least, at_least))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return in_mode(image, mode)
    except PictureError:
        raise
    except FileNotFoundError as error:
        raise PictureError(name, "missing") from error
    except UnidentifiedImageError as error:
        raise PictureError(name, "not a picture" if content else "empty file") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(name, "oversized", _TOO_LARGE) from error
    except MemoryError as error:
        raise PictureError(name, "out of memory") from error
    except Exception as error:  # decoders may raise anything on bytes from outside
        detail = getattr(error, "strerror", None) or " ".join(str(error).split())
        is_cut = "truncated" in detail.lower() or isinstance(error, EOFError)
        raise PictureError(name, "truncated" if is_cut else "unreadable", detail) from error


_TOO_LARGE = f"over {MAX_PIXELS // 10**6} megapixels"


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise PictureError(name, "oversized", _TOO_LARGE)
    if max(width, height) > MAX_ASPECT * min(width, height):
        shape = f"{width:,} × {height:,} pixels; a side may be {MAX_ASPECT} times the other"
        raise PictureError(name, "too narrow", shape)


@cache
def _register_heif() -> None:
    """Add HEIC to Pillow where its package is installed; one thread a picture, as elsewhere."""
    if READS_HEIF:
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False)
        pillow_heif.options.DECODE_THREADS = 1


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to "RGB" or "L": 16 bits and floats become 8 bits, transparent pixels white."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _in_8_bits(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Keep the upper 8 of 16 bits; scale floats of 0…1 or 0…255.

    Others raise ValueError, as their black and white are not known.
    """
    pixels = np.asarray(image)
    least, largest = pixels.min().item(), pixels.max().item()  # NaN if one is
    if not (least >= 0 and largest <= (255 if image.mode == "F" else 65535)):
        raise ValueError(f"pixels from {least:.6g} to {largest:.6g}; scale them to 8 or 16 bits")
    if image.mode == "F":
        pixels = pixels * (255.0 if largest <= 1 else 1.0) + 0.5
    elif image.mode != "I" or largest > 255:
        pixels = pixels >> 8
    return Image.fromarray(pixels.astype(np.uint8))


def resized_size(width: int, height: int, preprocessing: Preprocessing) -> tuple[int, int]:
    """Return width and height when the short side, or (squashed) both, are as asked."""
    side, short = preprocessing.resize, min(width, height)
    if preprocessing.squash:
        return side, side
    return max(side, round(width * side / short)), max(side, round(height * side / short))


def resized(image: Image.Image, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Return a picture as the array (H, W) or (H, W, 3) that crops are taken from."""
    size = resized_size(*image.size, preprocessing)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(image)


def decode_resized(source: Path | bytes, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Decode a picture to the array that crops are taken from."""
    image = decode(source, mode=preprocessing.mode, at_least=preprocessing.resize)
    return resized(image, preprocessing)


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """Shrink a picture to fit side × side; smaller ones stay as they are."""
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return image


def shrunk_item(collection: Collection, row: int, *, side: int) -> Image.Image | None:
    """Return an item's picture, shrunk; None where it has none, or it can't be read any more."""
    if collection.images is not None:
        return shrunk(Image.fromarray(np.ascontiguousarray(collection.images[row])), side)
    if not collection.paths:
        return None
    try:
        return shrunk(decode(collection.paths[row], at_least=side), side)
    except PictureError:
        return None


def encoded(image: Image.Image) -> tuple[bytes, str]:
    """Return bytes and media type: PNG for tiny pictures, whose pixels are visible, else JPEG.

    Pictures are always encoded again for a page: no byte of the original file is passed on.
    """
    tiny = max(image.size) <= 64
    with io.BytesIO() as buffer:
        kind = "PNG" if tiny else "JPEG"
        image.save(buffer, kind, quality=82, optimize=True, icc_profile=None, comment=b"")
        return buffer.getvalue(), "image/png" if tiny else "image/jpeg"


def data_uri(content: bytes, media: str) -> str:
    """Return an encoded picture as a data: address."""
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
