"""A small picture, encoded anew: no foreign byte is passed on."""

import io

from PIL import Image


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """The picture within side × side; smaller ones stay as they are."""
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return image


def encoded(image: Image.Image) -> tuple[bytes, str]:
    """Bytes and media type: PNG for tiny pictures, whose pixels are seen, else JPEG."""
    tiny = max(image.size) <= 64
    with io.BytesIO() as buffer:
        image.save(buffer, "PNG" if tiny else "JPEG", quality=82, optimize=True)
        return buffer.getvalue(), "image/png" if tiny else "image/jpeg"
