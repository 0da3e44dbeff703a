"""Formats of pictures: those that this Pillow can read, by content and by name.

AVIF comes with Pillow from 11.3 on, HEIC with the package pillow-heif (extra `heif`).
"""

import importlib.util
from functools import cache

from PIL import Image, features

_AVIF, _HEIF = (".avif",), (".heic", ".heif")


def reads_avif() -> bool:
    """Return whether this Pillow decodes AVIF."""
    return "avif" in features.modules and bool(features.check_module("avif"))


def reads_heif() -> bool:
    """Return whether the plug-in that decodes HEIC is installed."""
    return importlib.util.find_spec("pillow_heif") is not None


FORMATS = (
    *("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"),
    *(("AVIF",) if reads_avif() else ()),
    *(("HEIF",) if reads_heif() else ()),
)
"""Pillow's names of the formats that are decoded; all others are refused."""
PICTURE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(_AVIF if reads_avif() else ()),
        *(_HEIF if reads_heif() else ()),
    )
)


def why_not_read(suffix: str) -> str:
    """Return a reason in the plural for a file that no reader here takes."""
    if suffix in _AVIF:
        return "AVIF files, for which Pillow 11.3 or newer is needed,"
    if suffix in _HEIF:
        return "HEIC files, for which pip install 'nofuss[heif]' is needed,"
    return "files that are not pictures"


@cache
def register_heif() -> None:
    """Add the HEIC plug-in to Pillow; with one thread a picture, as for the other formats."""
    import pillow_heif

    pillow_heif.register_heif_opener(thumbnails=False)
    pillow_heif.options.DECODE_THREADS = 1
    Image.init()
