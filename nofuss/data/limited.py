"""A process that decodes pictures under limits of memory and time; `search/decoders.py` starts it.

    in    length, JSON {"path" or "bytes", "side", "resize", "squash", "mode"}, the picture's bytes
    out   length, JSON {"shape", "pixels", "content", "media"} or {"error"}, pixels, a thumbnail

It reads one picture after the other from its standard input, and exits when that ends. Hostile
bytes can harm only this process, and the system kills it when it exceeds a limit.
"""

import io
import json
import os
import re
import resource
import struct
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode, in_mode, resized
from nofuss.data.thumbnail import encoded, shrunk

SECONDS = 5
"""Processor time for one picture."""
MEMORY = 290_000_000
"""Bytes for one picture, above the memory of the idle process."""


def main() -> None:
    """Decode pictures from standard input until it ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not mix with the answers
    _limit_memory()
    _send(sink, {"ready": True})
    while head := source.read(4):
        job = json.loads(source.read(struct.unpack("<I", head)[0]))
        body = source.read(job["bytes"]) if job["path"] is None else b""
        _limit_time()
        try:
            _send(sink, *_answer(job, body))
        except PictureError as error:
            _send(sink, {"error": [error.reason, error.detail]})
        except MemoryError:
            _send(sink, {"error": ["out of memory", ""]})
        del body


def _answer(job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    side, resize = job["side"], job["resize"]

    def decoded(at_least: int) -> Image.Image:
        source = io.BytesIO(body) if job["path"] is None else Path(job["path"])
        return decode(source, at_least=at_least)

    # At the scale of `decode_resized`: a JPEG of another scale has another embedding.
    image = decoded(resize or side)
    pixels, shape = b"", None
    if resize:
        fit = Preprocessing(resize, resize, squash=job["squash"], mode=job["mode"])
        array = np.asarray(resized(in_mode(image, fit.mode), fit))
        pixels, shape = array.tobytes(), array.shape
        if resize < side and min(image.size) < side:  # perhaps a JPEG too small for the thumbnail
            del image
            image = decoded(side)
    content, media = encoded(shrunk(image, side))
    sizes = {"pixels": len(pixels), "content": len(content)}
    return {"shape": shape, "media": media} | sizes, pixels, content


def _send(sink: IO[bytes], head: dict[str, Any], *parts: bytes) -> None:
    text = json.dumps(head).encode()
    for part in (struct.pack("<I", len(text)), text, *parts):
        sink.write(part)
    sink.flush()


def _limit_memory() -> None:
    """Limit the memory of this process, and forbid it to write files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        match = re.search(r"VmData:\s*(\d+) kB", status)
        held = 1024 * int(match[1]) if match else 2**28
        resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, held + MEMORY))


def _limit_time() -> None:
    """Let the system kill this process when the next picture takes too long."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    used = sum(os.times()[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS + 1, hard_limit))


if __name__ == "__main__":
    main()
