"""Time and memory of the stages of a trial: the tables are also a test of scale."""

import resource
import sys
import time

STAGES = {
    "prepare": "model, proxies",
    "train": "training",
    "embed": "test embeddings",
    "recall": "Recall@K",
    "nmi": "NMI",
}
"""What is timed, and what it is called in the report."""


class Stopwatch:
    """Seconds of stages that follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin a stage now, and not where the last one ended."""
        self._began = time.monotonic()

    def stop(self, stage: str) -> None:
        """End a stage; the next one begins."""
        self.seconds[stage] = time.monotonic() - self._began
        self.start()


def peak_memory() -> int:
    """Return the most bytes that this process has held so far."""
    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
