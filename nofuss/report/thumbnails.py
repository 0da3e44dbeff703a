"""Small pictures of a collection's items, always re-encoded: no byte of a file is copied."""

import base64

import numpy as np
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode
from nofuss.data.thumbnail import shrunk

SIDE = 112
"""Longest side in pixels; more than the page shows, for dense screens."""


def has_pictures(collection: Collection) -> bool:
    """Return whether the items are pictures."""
    return collection.kind in ("pictures", "images")


def picture(collection: Collection, row: int, *, side: int) -> Image.Image | None:
    """Return the item at most `side` pixels large; None where its file can't be read any more."""
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


def data_uri(content: bytes, media: str) -> str:
    """Return an encoded picture as a data: address."""
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
