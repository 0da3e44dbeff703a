"""Work shared by threads: order, errors, Ctrl-C, forks, callers at the same time."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from nofuss.distributed.threads import blocks, in_threads, map_in_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_blocks_cover_all() -> None:
    assert [*blocks(2, 9, 3)] == [slice(2, 5), slice(5, 8), slice(8, 9)]
    assert [*blocks(2, 2, 3)] == []


def test_each_part_is_worked_on_with_one_core_and_returned_in_order() -> None:
    def work(part: int) -> tuple[int, int, bool, int]:
        time.sleep(0.01)
        return part, torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()

    parts, cores, graded, threads = zip(*map_in_threads(work, [5, 6, 7]), strict=True)
    assert (parts, cores, graded) == ((5, 6, 7), (1, 1, 1), (False,) * 3)
    assert threading.get_ident() in threads
    assert len({*threads}) == 3
    assert torch.get_num_threads() == 3
    assert torch.is_grad_enabled()


def test_pieces_are_shared() -> None:
    found = in_threads(list, range(100))
    assert sorted(chain(*found)) == [*range(100)]
    assert in_threads(list, ()) == [[]]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_an_error_ends_all_and_is_raised(where: str) -> None:
    begun: list[int] = []

    def work(rest: Iterator[int]) -> None:
        is_here = threading.current_thread() is threading.main_thread()
        for piece in rest:
            begun.append(piece)
            time.sleep(0.01)
            if is_here == (where == "here"):
                raise KeyboardInterrupt  # as Ctrl-C in the midst of it

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(1000))
    assert len(begun) < 20
    assert torch.get_num_threads() == 3


def test_callers_at_the_same_time_do_not_wait_for_each_other() -> None:
    release, all_begun = threading.Event(), threading.Semaphore(0)

    def hold(part: int) -> int:
        all_begun.release()
        assert release.wait(60)
        return part

    def caller() -> list[int]:
        torch.set_num_threads(3)
        return map_in_threads(hold, range((os.cpu_count() or 1) + 1))

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(caller)
        for _ in range((os.cpu_count() or 1) + 1):
            all_begun.acquire()
        try:  # every thread is taken: the work is done here
            assert map_in_threads(lambda part: (part, threading.get_ident()), [1, 2]) == [
                (1, threading.get_ident()),
                (2, threading.get_ident()),
            ]
        finally:
            release.set()
        assert held.result() == [*range((os.cpu_count() or 1) + 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    map_in_threads(lambda part: part, [1, 2, 3])
    child = os.fork()
    if not child:
        os._exit(7 if map_in_threads(lambda part: part, [1, 2, 3]) == [1, 2, 3] else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 7
