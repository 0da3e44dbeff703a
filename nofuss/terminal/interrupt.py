"""Ctrl-C and SIGTERM: the first asks for a stop at the next step, the second ends at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether to stop; restore the previous handlers afterwards."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            os._exit(130)
        asked.set()
        say("stopping after this step and saving; repeat to stop at once without saving")

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
