"""Requests of the page that are refused: a status and one line, as JSON."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nofuss.data.decode import PictureError
from nofuss.errors import EngineError
from nofuss.search.json_response import Json

log = logging.getLogger("nofuss")


class Refused(Exception):
    """A request that is answered with an error status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


async def refuse(request: Request, error: Exception) -> Response:
    """Answer with the status and message of a `Refused`."""
    assert isinstance(error, Refused)
    # Close: the unread rest of a body must not be taken for the next request.
    return Json({"error": error.message}, error.status, {"Connection": "close"})


async def refuse_picture(request: Request, error: Exception) -> Response:
    """Say what is wrong with an uploaded picture."""
    assert isinstance(error, PictureError)
    formats = "JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF"
    words = {
        "not a picture": f"this is not a picture of a known format; send {formats}",
        "oversized": f"the picture has too many pixels ({error.detail}); send a smaller one",
        "truncated": "the picture is cut off; send the whole file",
        "too narrow": f"the picture is nearly a line ({error.detail}); send a part of it",
        "out of memory": "the picture takes too much memory to decode; send a smaller one",
        "too slow": f"the picture takes too long to decode ({error.detail}); save it again",
    }
    message = words.get(error.reason, f"the picture can't be read; send {formats}")
    return Json({"error": message}, 415 if error.reason == "not a picture" else 422)


async def refuse_engine(request: Request, error: Exception) -> Response:
    """Say that the database failed; why, which may name machines, is for the terminal only."""
    log.error(f"{request.url.path} failed: {error}")
    return Json({"error": "the database does not answer; try again later"}, 503)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Refuse an unknown address or method."""
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code, error.headers)


REFUSALS = {
    Refused: refuse,
    PictureError: refuse_picture,
    HTTPException: refuse_http,
    EngineError: refuse_engine,
}
