"""The threads of this process, each computing with one core.

On blocks that fit into a core's cache, waking the other cores for every operation takes longer than
it saves, and most of all where waiting threads sleep (`OMP_WAIT_POLICY=PASSIVE`). So each thread
takes whole pieces of the work, and torch computes each of its operations with one core.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")


def they_sleep() -> bool:
    """Return whether torch's threads sleep between operations, as our commands have them."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


def blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size` from start to stop."""
    return (slice(i, min(i + size, stop)) for i in range(start, stop, size))


def in_threads(work: Callable[[Iterator[P]], R], pieces: Iterable[P]) -> list[R]:
    """Return what `work` returns in each thread; the threads share the pieces of work.

    As many threads as torch uses.
    """
    shared = list(pieces)
    threads = max(1, min(torch.get_num_threads(), len(shared)))

    def work_to_the_end(rest: Iterator[P]) -> R:
        try:
            return work(rest)
        finally:
            deque(rest, maxlen=0)  # after an error or Ctrl-C no thread takes another piece

    return each_in_thread(work_to_the_end, [iter(shared)] * threads)


def each_in_thread(work: Callable[[P], R], parts: Sequence[P]) -> list[R]:
    """Return `work` of each part, without gradients; the first part is the calling thread's."""
    if len(parts) < 2:
        return [work(part) for part in parts]
    threads, mode = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def work_alone(part: P) -> R:
        torch.set_num_threads(1)
        with torch.inference_mode(mode), torch.no_grad():  # both are each thread's own
            return work(part)

    others = [_pool().submit(work_alone, part) for part in parts[1:]]
    try:
        results = [work_alone(parts[0])]
        for part, other in zip(parts[1:], others, strict=True):
            # What no thread has begun, since they all work for another caller, is done here.
            results.append(work_alone(part) if other.cancel() else other.result())
        return results
    except BaseException:
        wait([other for other in others if not other.cancel()])
        raise
    finally:
        torch.set_num_threads(threads)  # else threads that start later would have one core


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads, which stay: a new one starts in 0.1 ms, on memory of its own."""
    return ThreadPoolExecutor(os.cpu_count(), "nofuss-core")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
