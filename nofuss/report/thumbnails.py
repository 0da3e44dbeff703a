"""Small pictures of a collection's items, always encoded anew: no foreign byte is passed on."""

import base64

import numpy as np
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode
from nofuss.data.thumbnail import shrunk

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


def data_uri(content: bytes, media: str) -> str:
    """An encoded picture as a data: address."""
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
