"""Ctrl-C and SIGTERM end the program in time, whatever it waits for.

Python handles a signal between two of its own instructions. A disk that does not respond (a network
drive whose server is gone) holds the main thread in a system call where that never happens, and
where the signal itself stays pending. So a thread looks for signals that nobody takes, and ends the
process. Files are replaced as a whole, so the worst that this leaves is what a kill leaves.

In training the first signal asks for a stop at the next step, and the second ends at once.
"""

import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 1.5
"""From the signal to the end of the process; it should take less than two."""
LOOK = 0.25
"""Seconds between looks for a signal that is pending."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PENDING = re.compile(r"(?:SigPnd|ShdPnd):\s*([0-9a-f]+)")
_stops: list[threading.Event] = []
"""Set when somebody has been asked to stop; the last one is in force."""


@contextmanager
def ending_in_time() -> Iterator[None]:
    """End the process `SECONDS` after a signal that arrives within, if it still runs then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    arguments = (source, threading.get_native_id())
    threading.Thread(target=_watch, args=arguments, name="interrupt", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(sink)


def _watch(source: int, main: int) -> None:
    """See that the process ends after a signal; return when `source` is closed."""
    # Signals are counted here: by the time that this thread sees the first one of a training, the
    # handler may have set its event already.
    asked, count = None, 0
    with open(source, "rb", buffering=0) as taken:
        while True:
            if select.select([taken], [], [], LOOK)[0]:  # the main thread took a signal
                number = taken.read(1)
                if not number:
                    return
                if number[0] not in _SIGNALS:
                    continue
                stop = _stops[-1] if _stops else None
                asked, count = stop, count + 1 if stop is asked else 1
                if stop is not None and count == 1:
                    continue  # training will stop at the next step
                time.sleep(SECONDS)
                break
            if _is_pending(main):
                time.sleep(SECONDS - LOOK)
                if _is_pending(main):
                    break
    os.write(2, b"nofuss: stopped: a disk or a computation did not respond in time\n")
    os._exit(130)


def _is_pending(main: int) -> bool:
    """Return whether a signal waits for the main thread, which is in a system call; on Linux."""
    try:
        status = Path(f"/proc/self/task/{main}/status").read_text()
    except OSError:
        return False
    pending = sum(int(bits, 16) for bits in _PENDING.findall(status))
    return any(pending >> number - 1 & 1 for number in _SIGNALS)


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
    previous = {s: signal.signal(s, handle) for s in _SIGNALS}
    _stops.append(asked)
    try:
        yield asked.is_set
    finally:
        _stops.remove(asked)
        for number, handler in previous.items():
            signal.signal(number, handler)
