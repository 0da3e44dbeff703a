"""The threads of this process, each computing with one core.

On blocks that fit into a core's cache, waking the other cores for every operation takes longer than
it saves, and most of all where waiting threads sleep (`OMP_WAIT_POLICY=PASSIVE`). So each thread
takes whole pieces of the work, and torch computes each of its operations with one core.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")


def they_sleep() -> bool:
    """Return whether torch's threads sleep between operations, as our commands have them."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch compute with one core in this thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size` from start to stop."""
    return (slice(i, min(i + size, stop)) for i in range(start, stop, size))


def in_threads(work: Callable[[Iterator[P]], R], pieces: Iterable[P]) -> list[R]:
    """Return what `work` returns in each thread; the threads share the pieces of work.

    As many threads as torch uses.
    """
    shared = list(pieces)
    rest = iter(shared)

    def work_to_the_end(rest: Iterator[P]) -> R:
        try:
            return work(rest)
        finally:
            deque(rest, maxlen=0)  # after an error or Ctrl-C no thread takes another piece

    return map_in_threads(
        work_to_the_end, [rest] * max(1, min(torch.get_num_threads(), len(shared)))
    )


def map_in_threads(work: Callable[[P], R], parts: Sequence[P]) -> list[R]:
    """Return `work` of each part, in order and without gradients.

    The calling thread works, too: where all others do something else, alone.
    """
    threads, mode = torch.get_num_threads(), torch.is_inference_mode_enabled()
    rest, results = iter(enumerate(parts)), dict[int, R]()
    if len(parts) < 2 or threads < 2:
        with torch.no_grad():
            return [work(part) for part in parts]

    def work_alone() -> None:
        # Modes are each thread's own. The cores are given back: else threads that start later
        # would have one.
        with one_core(), torch.inference_mode(mode), torch.no_grad():
            for i, part in rest:
                results[i] = work(part)

    others = [_pool().submit(work_alone) for _ in range(min(threads, len(parts)) - 1)]
    try:
        work_alone()
    finally:
        deque(rest, maxlen=0)
        begun = [other for other in others if not other.cancel()]
        wait(begun)
        torch.set_num_threads(threads)
    for other in begun:
        other.result()  # raises what it raised
    return [results[i] for i in range(len(parts))]


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads, which stay: a new one starts in 0.1 ms, on memory of its own."""
    return ThreadPoolExecutor(os.cpu_count(), "nofuss-core")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
