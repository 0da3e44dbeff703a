"""Small pictures, encoded again, so that no byte of the original file is passed on."""

import io

from PIL import Image


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """Shrink a picture to fit side × side; smaller ones stay as they are."""
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    return image


def encoded(image: Image.Image) -> tuple[bytes, str]:
    """Return bytes and media type: PNG for tiny pictures, whose pixels are visible, else JPEG."""
    tiny = max(image.size) <= 64
    with io.BytesIO() as buffer:
        image.save(buffer, "PNG" if tiny else "JPEG", quality=82, optimize=True)
        return buffer.getvalue(), "image/png" if tiny else "image/jpeg"
