"""Decode pictures of strangers in processes that are killed when they take too much.

    to the process    JSON {"side", "fits"}, then the encoded picture
    and back          JSON {"shapes", "media"} or {"error": [reason, detail]}, the pixels of each
                      fit, a thumbnail

A process may use so much time and memory, and write no file; one that answered is used again. Only
bytes and JSON are exchanged, never pickles: whoever sent the picture may be who answers.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode, encoded, in_mode, resized, shrunk

Bytes = bytes | bytearray
PROCESSES = 2
SECONDS, MEMORY = 5.0, 290_000_000
"""For one picture: wall-clock time, and bytes above those of the idle process."""
START_SECONDS = 60.0
LARGEST = 2**28
"""Most bytes of one part of an answer."""


class Decoded(NamedTuple):
    """A decoded picture: uint8 pixels of each fit, and a thumbnail's bytes and media type."""

    pixels: tuple[NDArray[np.uint8], ...]
    content: bytes
    media: str


class DecodePool:
    """A few processes that each decode a picture at a time; safe to use from several threads."""

    def __init__(self) -> None:
        self._workers = [_Worker() for _ in range(PROCESSES)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._is_closed = False
        for worker in self._workers:
            self._idle.put(worker)
        weakref.finalize(self, _end_all, self._workers)

    def start(self) -> None:
        """Start the processes before the first picture comes."""
        for worker in self._workers:
            worker.start()

    def decode(self, content: Bytes, *, side: int, fits: Sequence[Preprocessing] = ()) -> Decoded:
        """Return a thumbnail of at most `side`, and pixels resized by each fit; or PictureError."""
        worker = self._idle.get()
        try:
            if self._is_closed:
                raise PictureError("picture", "unreadable", "its decoder ended")
            return worker.decode(content, side, fits)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the processes, also those at work; no picture can be decoded afterwards."""
        self._is_closed = True
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()


def _end_all(workers: list["_Worker"]) -> None:
    for worker in workers:
        worker.end()


class _Worker:
    """A process, started again after it was killed, and the pipe to it."""

    process: "subprocess.Popen[bytes] | None" = None
    _is_ready = False

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._pipe, theirs = Pipe()
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        code = f"from nofuss.data.decode_pool import work; work({theirs.fileno()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: a folder of pictures may hold a PIL.py
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,  # Ctrl-C goes to the page only
            )

    def decode(self, content: Bytes, side: int, fits: Sequence[Preprocessing]) -> Decoded:
        """Send one picture to the process; kill it where no proper answer comes in time."""
        if self.process is not None and self.process.poll() is not None:
            self.end()  # it was killed while it was idle, which is not this picture's fault
        if self.process is None:
            self.start()
        began = float("inf")
        try:
            if not self._is_ready:
                with self._killed_after(START_SECONDS):
                    self._pipe.recv_bytes(LARGEST)
                self._is_ready = True
            began = time.monotonic()
            with self._killed_after(SECONDS):
                return self._ask(content, side, fits)
        except PictureError:
            raise
        except Exception:  # the picture may control the process, which then sends anything
            is_late = time.monotonic() - began >= SECONDS
            self.end()
            if is_late:
                raise PictureError("picture", "too slow", f"over {SECONDS:.0f} seconds") from None
            raise PictureError("picture", "unreadable", "its decoder ended") from None

    @contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        """Kill the process after this time, whereupon the pipe ends: nothing waits for longer."""
        assert self.process is not None
        timer = Timer(seconds, self.process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _ask(self, content: Bytes, side: int, fits: Sequence[Preprocessing]) -> Decoded:
        job = {"side": side, "fits": [asdict(fit) for fit in fits]}
        self._pipe.send_bytes(json.dumps(job).encode())
        self._pipe.send_bytes(content)
        head = json.loads(self._pipe.recv_bytes(2**16))
        if "error" in head:
            reason, detail = map(str, head["error"])
            raise PictureError("picture", reason, detail)
        pixels = tuple(
            np.frombuffer(self._pipe.recv_bytes(LARGEST), np.uint8).reshape(shape)
            for _, shape in zip(fits, head["shapes"], strict=True)
        )
        media = "image/png" if head["media"] == "image/png" else "image/jpeg"
        return Decoded(pixels, self._pipe.recv_bytes(LARGEST), media)

    def end(self) -> None:
        """Kill the process and forget it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._pipe.close()
        self.process, self._is_ready = None, False


def work(descriptor: int) -> None:
    """Decode pictures until the pipe ends: the whole life of a process of the pool."""
    pipe = Connection(descriptor)
    Image.init()  # what is loaded once is not part of a picture's cost
    _limit()
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        for part in _answer(pipe.recv_bytes(), job["side"], job["fits"]):
            pipe.send_bytes(part)


def _limit() -> None:
    """Limit the memory of this process, and forbid it to write files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere this limit does not cover what is allocated
        [kilobytes] = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
        most = 1024 * int(kilobytes) + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer(content: bytes, side: int, fits: Sequence[dict[str, Any]]) -> list[bytes]:
    try:
        pixels, decoded_for = list[NDArray[np.uint8]](), 0
        for fit in fits:
            # At the scale of `decode_resized`: a JPEG of another scale has another embedding.
            wanted = Preprocessing(**fit)
            image, decoded_for = decode(content, at_least=wanted.resize), wanted.resize
            pixels.append(resized(in_mode(image, wanted.mode), wanted))
        if decoded_for < side:  # perhaps a JPEG too small for the thumbnail
            image = decode(content, at_least=side)
        thumbnail, media = encoded(shrunk(image, side))
        head = json.dumps({"shapes": [array.shape for array in pixels], "media": media})
        return [head.encode(), *(array.tobytes() for array in pixels), thumbnail]
    except PictureError as error:
        return [json.dumps({"error": [error.reason, error.detail[:1000]]}).encode()]
    except MemoryError:
        return [json.dumps({"error": ["out of memory", ""]}).encode()]
