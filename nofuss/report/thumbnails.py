"""Small pictures of a collection's items, always encoded anew: no foreign byte is passed on."""

import base64
import io

import numpy as np
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode

SIDE = 112
"""Longest side in the report; twice what is shown, for dense screens."""


def has_pictures(collection: Collection) -> bool:
    """Whether there is anything to look at."""
    return collection.kind in ("pictures", "images")


def picture(collection: Collection, row: int, *, side: int) -> Image.Image | None:
    """The item at most `side` large; None where its file can't be read any more."""
    if collection.kind == "images" and collection.array is not None:
        image = Image.fromarray(np.ascontiguousarray(collection.array[row]))
    elif collection.decoded is not None:
        image = Image.fromarray(np.asarray(collection.decoded[row]))
    elif collection.kind == "pictures":
        try:
            image = decode(collection.paths[row], at_least=side)
        except PictureError:
            return None
    else:
        return None
    return shrunk(image, side)


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


def data_uri(image: Image.Image) -> str:
    """The picture as a data: address."""
    content, media = encoded(image)
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
