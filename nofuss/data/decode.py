"""Open one picture safely, whatever its file says it is.

Six formats are tried by content, not by name; the size is read from the header and checked
before any pixel is; JPEGs are decoded at reduced scale where more is not needed; the result is
upright, "RGB" or "L", with transparency laid over white, and the first frame where it moves.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from nofuss.config import Preprocessing
from nofuss.data.collection import printable
from nofuss.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 80_000_000
"""Larger pictures are refused unread: 80 megapixels are 240 MB once decoded."""

_filters = threading.Lock()  # warning filters belong to the process, not to a thread


class PictureError(DataError):
    """A picture that can't be used; `reason` says why in a word or two."""

    def __init__(self, name: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{name}: {reason}" + (f" ({detail})" if detail else ""))
        self.reason, self.detail = reason, detail


def decode(source: Path | IO[bytes], *, mode: str = "RGB", at_least: int = 0) -> Image.Image:
    """The picture at a path or in a file object, upright, in `mode`.

    `at_least` > 0 lets JPEGs come at an eighth to a half of their scale, as long as no side
    falls below it.
    """
    name = printable(source) if isinstance(source, Path) else "picture"
    try:
        # Pillow leaves a file that it opened itself open when decoding fails
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            image = _open(file)
            if at_least:
                image.draft(None, (at_least, at_least))
            image.load()
            with _quietly():
                image = ImageOps.exif_transpose(image)
        return in_mode(image, mode)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(name, "oversized", f"over {MAX_PIXELS // 10**6} megapixels") from error
    except FileNotFoundError as error:
        raise PictureError(name, "missing") from error
    except UnidentifiedImageError as error:
        raise PictureError(name, _unidentified(source)) from error
    except MemoryError as error:
        raise PictureError(name, "out of memory") from error
    except Exception as error:  # decoders of foreign bytes raise whatever they trip over
        detail = getattr(error, "strerror", None) or " ".join(str(error).split())
        truncated = "truncated" in detail.lower() or isinstance(error, EOFError)
        raise PictureError(name, "truncated" if truncated else "unreadable", detail) from error


def resized(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The picture with its short side, or squashed both, at `preprocessing.resize`."""
    side, (width, height) = preprocessing.resize, image.size
    if preprocessing.squash:
        size = (side, side)
    else:
        short = min(width, height)
        size = max(side, round(width * side / short)), max(side, round(height * side / short))
    if size == image.size:
        return image
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)


def decode_resized(source: Path | IO[bytes], preprocessing: Preprocessing) -> np.ndarray:
    """The picture as the uint8 array (H, W) or (H, W, 3) that crops are taken from."""
    image = decode(source, mode=preprocessing.mode, at_least=preprocessing.resize)
    return np.asarray(resized(image, preprocessing))


def _open(file: IO[bytes]) -> Image.Image:
    """Read the header only; refuse what is too large before a pixel is decoded."""
    with _quietly():
        image = Image.open(file, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    return image


@contextmanager
def _quietly() -> Iterator[None]:
    """Pillow's complaints about odd headers are not shown; those about bombs are errors."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """The picture as "RGB" or "L": 16 bits become 8, what is transparent becomes white."""
    if image.mode.startswith("I"):  # 16 bits a pixel: keep the upper eight, do not clip
        values = np.asarray(image).astype(np.int64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values >>= 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


def _unidentified(source: Path | IO[bytes]) -> str:
    empty = isinstance(source, Path) and source.stat().st_size == 0
    return "empty file" if empty else "not a picture"
