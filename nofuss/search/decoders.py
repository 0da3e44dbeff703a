"""Decode pictures in processes that can be killed: too slow, too large, or the client left.

A process that answered is kept for the next picture, one that did not is killed. A process that
hangs in the file system can't be killed and stays; there may be only a few of these.
"""

import asyncio
import json
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nofuss.config import Preprocessing
from nofuss.data.cost import MAX_FILE
from nofuss.data.decode import PictureError
from nofuss.files.atomic import read_regular
from nofuss.files.parts import is_compressed

SECONDS = 5.0
"""For one picture, in wall-clock time: a file system may hang."""
AT_ONCE = 2
LEFT_BEHIND = 8
"""Most processes that hang in the file system."""
_START_SECONDS = 60.0
_LARGEST = 2**28  # bytes of one part of an answer


class Seen(NamedTuple):
    """A decoded picture: uint8 pixels where requested, and a thumbnail's bytes and type."""

    pixels: NDArray[np.uint8] | None
    content: bytes
    media: str


class Decoders:
    """Decodes a few pictures at a time, each in a separate process."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start a process before the first picture comes."""
        with suppress(PictureError):
            self._idle.append(await self._new())

    async def stop(self) -> None:
        """End all processes, without waiting for one that hangs."""
        for process in self._all:
            _kill(process)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                for process in self._all:
                    await process.wait()

    async def decode(
        self, source: bytes | bytearray | Path, *, side: int, fit: Preprocessing | None = None
    ) -> Seen:
        """Return a thumbnail of at most `side`, and pixels resized by `fit`; or a PictureError."""
        if isinstance(source, Path) and is_compressed(source):
            source = await asyncio.to_thread(_content, source)
        job = {
            "path": os.fspath(source) if isinstance(source, Path) else None,
            "bytes": 0 if isinstance(source, Path) else len(source),
            "side": side,
            "resize": fit.resize if fit else 0,
            "squash": bool(fit and fit.squash),
            "mode": fit.mode if fit else "RGB",
        }
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._new()
            try:
                async with asyncio.timeout(SECONDS):
                    seen = await _ask(process, job, b"" if isinstance(source, Path) else source)
            except PictureError:
                self._idle.append(process)
                raise
            except TimeoutError:
                _kill(process)
                raise PictureError("picture", "too slow", f"over {SECONDS:.0f} seconds") from None
            except (asyncio.IncompleteReadError, OSError, ValueError, KeyError, TypeError):
                _kill(process)
                raise PictureError("picture", "unreadable", "its decoder ended") from None
            except BaseException:  # cancelled: the client has gone
                _kill(process)
                raise
            self._idle.append(process)
            return seen

    async def _new(self) -> asyncio.subprocess.Process:
        self._all = [process for process in self._all if process.returncode is None]
        if len(self._all) >= AT_ONCE + LEFT_BEHIND:
            raise PictureError("picture", "unreadable", "too many files could not be read in time")
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder of pictures may hold a PIL.py
            "-c",
            "from nofuss.data.limited import main; main()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # Ctrl-C goes to the server only
        )
        self._all.append(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _receive(process)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, ValueError):
            _kill(process)
            raise PictureError("picture", "unreadable", "no decoder could be started") from None
        except BaseException:
            _kill(process)
            raise
        return process


def _content(path: Path) -> bytes:
    """Read a picture that takes more than a decoder may use to find: a row of a Parquet file."""
    try:
        return read_regular(path, limit=MAX_FILE)
    except OSError as error:
        raise PictureError("picture", "unreadable", error.strerror or "") from None


async def _ask(
    process: asyncio.subprocess.Process, job: dict[str, Any], body: bytes | bytearray
) -> Seen:
    """Send one picture to a process; its answer is checked, as the picture may control it."""
    assert process.stdin is not None
    text = json.dumps(job).encode()
    process.stdin.write(struct.pack("<I", len(text)) + text)
    process.stdin.write(body)
    await process.stdin.drain()
    head = await _receive(process)
    if "error" in head:
        reason, detail = map(str, head["error"])
        raise PictureError("picture", reason, detail)
    pixels = await _exactly(process, head["pixels"])
    content = await _exactly(process, head["content"])
    array = None
    if job["resize"]:
        array = np.frombuffer(pixels, dtype=np.uint8).reshape([int(n) for n in head["shape"]])
    media = "image/png" if head["media"] == "image/png" else "image/jpeg"
    return Seen(array, content, media)


async def _receive(process: asyncio.subprocess.Process) -> dict[str, Any]:
    (size,) = struct.unpack("<I", await _exactly(process, 4))
    head = json.loads(await _exactly(process, size if size < 2**16 else -1))
    if not isinstance(head, dict):
        raise ValueError("the answer is not a JSON object")
    return head


async def _exactly(process: asyncio.subprocess.Process, size: int) -> bytes:
    if not isinstance(size, int) or not 0 <= size <= _LARGEST:
        raise ValueError("the answer is too large")
    assert process.stdout is not None
    return await process.stdout.readexactly(size)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
