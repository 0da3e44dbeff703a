"""Ctrl-C in a training whose step takes longer than the patience: the step ends, and is saved."""

import signal
import subprocess
import sys

PROGRAM = """
import time
from nofuss.terminal.interrupt import SECONDS, ending_in_time, stop_on_signals

with ending_in_time(), stop_on_signals(print) as stop:
    print("begun", flush=True)
    until = time.monotonic() + SECONDS + 1
    while time.monotonic() < until:  # in Python, so that the handler runs before any other thread
        pass
    print("saved" if stop() else "not asked", flush=True)
"""


def test_the_first_signal_waits_for_the_step() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.splitlines()[-1] == "saved"
