"""Open one picture safely, whatever its file contains.

The formats in `formats.py` are recognised by content, not by name. What decoding will cost is known
from the header and checked before any pixel is decoded (`cost.py`); JPEGs are decoded at reduced
scale where that is enough. The result is upright, "RGB" or "L", with transparency over white; of an
animation it is the first frame.
"""

import io
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from nofuss.config import Preprocessing
from nofuss.data import cost
from nofuss.data.collection import printable
from nofuss.data.formats import FORMATS, register_heif
from nofuss.errors import DataError
from nofuss.files.atomic import open_regular
from nofuss.files.parts import status_of

_SMALL = 2**24  # bytes of a file that is read at once
_MAX_EXIF = 2**20
_BAND = 2**20  # pixels that are converted at once

_filters = threading.Lock()  # warning filters belong to the process, not to a thread


class PictureError(DataError):
    """A picture that can't be used; `reason` says why in a word or two."""

    def __init__(self, name: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{name}: {reason}" + (f" ({detail})" if detail else ""))
        self.reason, self.detail = reason, detail


def decode(source: Path | IO[bytes], *, mode: str = "RGB", at_least: int = 0) -> Image.Image:
    """Decode the picture at a path or in a file object: upright, in `mode`.

    at_least: if positive, JPEGs may be decoded at an eighth to a half of their scale, as long as
    no side falls below it.
    """
    name = printable(source) if isinstance(source, Path) else "picture"
    try:
        with _opened(source) as file:
            return _decode(cost.Metered(file), mode, at_least)
    except DataError:
        raise
    except cost.TooMuch as error:
        raise PictureError(name, error.reason, error.detail) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        detail = f"over {cost.MAX_PIXELS // 10**6} megapixels"
        raise PictureError(name, "oversized", detail) from error
    except FileNotFoundError as error:
        raise PictureError(name, "missing") from error
    except UnidentifiedImageError as error:
        raise PictureError(name, _unidentified(source)) from error
    except MemoryError as error:
        raise PictureError(name, "out of memory") from error
    except Exception as error:  # decoders may raise anything on bytes from outside
        detail = getattr(error, "strerror", None) or " ".join(str(error).split())
        truncated = "truncated" in detail.lower() or isinstance(error, EOFError)
        raise PictureError(name, "truncated" if truncated else "unreadable", detail) from error


def resized(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Resize the short side of a picture, or (squashed) both, to `preprocessing.resize`.

    Only the middle of a very narrow picture is used: crops need no more.
    """
    side, (width, height) = preprocessing.resize, image.size
    if preprocessing.squash:
        size = (side, side)
    else:
        left, top, width, height = cost.middle_box(width, height, side)
        if (width, height) != image.size:
            image = image.crop((left, top, left + width, top + height))
        short = min(width, height)
        size = max(side, round(width * side / short)), max(side, round(height * side / short))
    if size == image.size:
        return image
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)


def decode_resized(source: Path | IO[bytes], preprocessing: Preprocessing) -> np.ndarray:
    """Decode a picture to the uint8 array (H, W) or (H, W, 3) that crops are taken from."""
    image = decode(source, mode=preprocessing.mode, at_least=preprocessing.resize)
    return np.asarray(resized(image, preprocessing))


@contextmanager
def _opened(source: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open the file; a small one is read into memory: it can't change while it is decoded."""
    if not isinstance(source, Path):
        yield source
        return
    # Pillow leaves a file that it opened itself open when decoding fails
    with open_regular(source, limit=cost.MAX_FILE) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        yield io.BytesIO(file.read()) if size <= _SMALL else file


def _decode(file: cost.Metered, mode: str, at_least: int) -> Image.Image:
    """Check everything that the header says, then decode."""
    buffers = cost.check_start(file)
    if "HEIF" in FORMATS:
        register_heif()
    with _quietly():
        image: Image.Image = Image.open(cast(IO[bytes], file), formats=FORMATS)
        turned = image.format == "TIFF" and _orientation(image) != 1  # Pillow rotates these itself
    cost.check_size(*image.size)
    buffers += cost.check_work(image, file)
    if at_least:
        image.draft(None, (at_least, at_least))
    cost.check_memory(image, file, mode, buffers=buffers, turned=turned)
    image.load()
    with _quietly():
        if _orientation(image) != 1:  # known only now: a PNG may have it behind its pixels
            cost.check_memory(image, file, mode, buffers=0, turned=True)
            image = ImageOps.exif_transpose(image)
    return in_mode(image, mode)


def _orientation(image: Image.Image) -> int:
    """Return the Exif orientation: 1 for upright, 2 to 8 for a turned or mirrored picture."""
    if len(image.info.get("exif") or b"") > _MAX_EXIF:
        del image.info["exif"]  # more than any camera writes, and slow to read
    value = image.getexif().get(ExifTags.Base.Orientation, 1)
    return value if value in range(2, 9) else 1


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide Pillow's warnings about odd headers; those about decompression bombs become errors."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to "RGB" or "L": 16 bits become 8, transparent pixels become white.

    Floating-point pixels are from 0 to 1 or from 0 to 255; others raise ValueError, as their black
    and white are not known.
    """
    if image.mode == "F":
        factor = 255.0 if _largest_float(image) <= 1 else 1.0
        image = _by_bands(image, "L", lambda band: _rounded(band, factor))
    if image.mode.startswith("I"):  # 16 bits a pixel: keep the upper eight, do not clip
        least, largest = cast(tuple[int, int], image.getextrema())
        if least < 0 or largest > 65535:
            raise ValueError(_out_of_range(least, largest))
        shift = 8 if image.mode != "I" or largest > 255 else 0
        image = _by_bands(image, "L", lambda band: _upper_bits(band, shift))
    if image.has_transparency_data:
        return _by_bands(image, mode, lambda band: _over_white(band).convert(mode))
    return image if image.mode == mode else image.convert(mode)


def _by_bands(
    image: Image.Image, mode: str, change: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    """Convert a picture a few rows at a time, so that intermediate results take little memory."""
    width, height = image.size
    rows = max(1, _BAND // width)
    if rows >= height:
        return change(image)
    result = Image.new(mode, image.size)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        result.paste(change(band), (0, top))
    return result


def _largest_float(image: Image.Image) -> float:
    """Return the largest pixel; ValueError if one is not finite, or not in 0…255."""
    pixels = np.asarray(image)
    least, largest = float(pixels.min()), float(pixels.max())  # NaN if one is
    if not (least >= 0 and largest <= 255):
        raise ValueError(_out_of_range(least, largest))
    return largest


def _out_of_range(least: float, largest: float) -> str:
    return f"pixels from {least:.6g} to {largest:.6g}; scale them to 8 or 16 bits"


def _rounded(image: Image.Image, factor: float) -> Image.Image:
    return Image.fromarray((np.asarray(image) * factor + 0.5).astype(np.uint8))


def _upper_bits(image: Image.Image, shift: int) -> Image.Image:
    values = np.asarray(image).astype(np.int64) >> shift
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA"))


def _unidentified(source: Path | IO[bytes]) -> str:
    with suppress(OSError):
        if isinstance(source, Path) and status_of(source).size == 0:
            return "empty file"
    return "not a picture"
