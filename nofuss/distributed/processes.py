"""Several processes that work as one: ranks, shares of the work, and torch.distributed's sums.

torchrun starts the processes and gives each its rank; all then run the same program in step. A
program that has not called `joined` is alone: then each function returns its input, and
torch.distributed is not used.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nofuss.errors import DataError, NofussError, ProcessError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = 600.0
"""Seconds after which a collective that another process does not reach fails; $NOFUSS_TIMEOUT."""


@dataclass(frozen=True)
class _Group:
    rank: int
    world: int
    store: "Store"
    numbers: "count[int]" = field(default_factory=count)
    """Of the waits, the same in all processes."""


_group: _Group | None = None
_is_alone = False
"""Whether this process is inside of `alone`."""


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted() -> bool:
    """Return whether torchrun has restarted any of the processes."""
    return any_true(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)[0]


def may_restart() -> bool:
    """Return whether torchrun may restart processes (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def rank() -> int:
    """Return the number of this process, from 0."""
    return _group.rank if _group else 0


def world() -> int:
    """Return the number of processes that work together."""
    return _group.world if _group else 1


def first() -> bool:
    """Return whether this process is rank 0, which writes files and prints."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """Join the other processes that torchrun started, until the end of the `with` or `leave`."""
    global _group
    if not under_torchrun():
        yield
        return
    limit = timedelta(seconds=_timeout())
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    # nccl would record a failure in torchrun's store, and the next attempt would stop over it.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    try:
        store, number, total = next(iter(rendezvous("env://", timeout=limit)))
        # torchrun's store outlives the processes, with the addresses of those that have ended.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
            store=store,
            rank=number,
            world_size=total,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ProcessError(
            f"rank {os.environ['RANK']} can't reach the other processes: {reason}; on one machine "
            "GLOO_SOCKET_IFNAME=lo often helps"
        ) from error
    _group = _Group(number, total, store)
    try:
        yield
        leave()
    except RuntimeError as error:  # gloo's errors have no type of their own
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise ProcessError(
            f"another process has ended or hangs ({str(error).splitlines()[0]}); run the command "
            "again, or resume a training with --resume"
        ) from error
    finally:
        _group = None


def _timeout() -> float:
    given = os.environ.get("NOFUSS_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"NOFUSS_TIMEOUT is {given!r}; expected seconds, a number above 0")
    return seconds


def leave() -> bool:
    """End the work of several processes, in all of them; return True in the first one.

    The first process goes on alone with what needs one process, the others return. Ranks stay.
    """
    global _group
    if _group is not None and dist.is_initialized():
        any_true(False)  # nobody goes while others still wait for a sum
        # A thread of gloo may still have to release a tensor, for which it needs the interpreter's
        # lock. In torch 2.6 the next call holds that lock while it waits for the thread, forever.
        time.sleep(0.05)
        dist.destroy_process_group()
        _group = _Group(_group.rank, 1, _group.store)
    return first()


@contextmanager
def alone() -> Iterator[None]:
    """Let one process work on its own: inside, collectives do nothing."""
    global _group, _is_alone
    (kept, _group), (was_alone, _is_alone) = (_group, None), (_is_alone, True)
    try:
        yield
    finally:
        _group, _is_alone = kept, was_alone


@contextmanager
def in_turn() -> Iterator[None]:
    """Let the first process of each machine go first; the others then find its results cached."""
    if _group is None or world() == 1:
        yield
        return
    key = f"turn/{next(_group.numbers)}/{os.environ['GROUP_RANK']}"
    if os.environ["LOCAL_RANK"] != "0":
        _wait(_group.store, key)
    try:
        with alone():
            yield
    finally:
        _group.store.set(key, "")


def from_first(work: Callable[[], str]) -> str:
    """Return what the work of the first process returns; if it fails, all processes end."""
    if _group is None or world() == 1:
        return work()
    key, store = f"first/{next(_group.numbers)}", _group.store
    if not first():
        _wait(store, key)
        if code := int(store.get(key)):
            raise SystemExit(code)  # the first process prints the reason
        return exchange("")[0]
    code = 1
    try:
        with alone():
            text = work()
        code = 0
    except BaseException as error:  # also a stop, which may have reached this process alone
        if not isinstance(error, Exception):
            code = 130
        elif isinstance(error, NofussError):
            code = error.exit_code
        raise
    finally:
        store.set(key, str(code))
    return exchange(text)[0]


def _wait(store: "Store", key: str) -> None:
    """Wait for a key as long as it takes: collectives have a time limit, and no signal ends one."""
    while not store.check([key]):
        time.sleep(0.05)


def share(total: int) -> slice:
    """Return this process's part of `total` items: neighbouring ones, as evenly as possible."""
    return share_of(rank(), total)


def share_of(number: int, total: int) -> slice:
    """Return the part of the process with that rank."""
    return slice(number * total // world(), (number + 1) * total // world())


def all_sum(x: Tensor) -> Tensor:
    """Sum x over all processes, in place."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """Take the maximum of x over all processes, in place."""
    if world() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Set the tensors to those of the first process, in place."""
    if world() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def merge_rows(x: Tensor, own: slice) -> Tensor:
    """Fill x in place with each process's `own` rows.

    By a sum with zeros: shares may differ in length, and adding 0 changes no number.
    """
    if world() > 1:
        x[: own.start] = 0
        x[own.stop :] = 0
        all_sum(x)
    return x


def gather_rows(own: Tensor, total: int) -> Tensor:
    """Return the rows of all processes, (total, …), where each holds those of its `share`."""
    if world() == 1:
        return own
    whole = own.new_empty(total, *own.shape[1:])
    whole[share(total)] = own
    return merge_rows(whole, share(total))


def together() -> bool:
    """Return whether several processes train now: `joined`, or a script's own process group."""
    is_up = dist.is_available() and dist.is_initialized()
    return not _is_alone and is_up and dist.get_world_size() > 1


def rows_of_all(x: Tensor) -> list[Tensor]:
    """Return the rows of all processes that are `together`, by rank; each may have its number."""
    counts = [
        torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(counts, torch.tensor([len(x)], device=x.device))
    padded = x.new_zeros(max(map(int, counts)), *x.shape[1:])
    padded[: len(x)] = x
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return [each[: int(count)] for each, count in zip(rows, counts, strict=True)]


def any_true(*flags: bool) -> tuple[bool, ...]:
    """Return which of the flags are true in any process."""
    if world() == 1:
        return flags
    return tuple(all_max(torch.tensor(flags, dtype=torch.uint8)).bool().tolist())


def exchange(text: str) -> list[str]:
    """Return the texts of all processes, by rank."""
    if world() == 1:
        return [text]
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = torch.zeros(world(), dtype=torch.int64)
    lengths[rank()] = len(data)
    all_sum(lengths)
    whole = torch.zeros(world(), int(lengths.max()), dtype=torch.uint8)
    whole[rank(), : len(data)] = data
    all_sum(whole)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(whole, lengths, strict=True)]


def check_same(what: str, describe: Callable[[], str]) -> None:
    """Raise if the processes differ in something that must be the same."""
    if world() == 1:
        return
    digests = exchange(hashlib.sha256(describe().encode(errors="backslashreplace")).hexdigest())
    if differing := [number for number, each in enumerate(digests) if each != digests[0]]:
        raise DataError(
            f"rank {differing[0]} has other {what} than rank 0; give all processes the same"
        )
