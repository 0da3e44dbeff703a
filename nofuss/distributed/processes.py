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

from nofuss.errors import DataError, NofussError, ProcessError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT = 600.0
"""Seconds after which a collective that another process does not reach fails; $NOFUSS_TIMEOUT."""


@dataclass(frozen=True)
class _Group:
    rank: int = 0
    world: int = 1
    store: "Store | None" = None
    numbers: "count[int]" = field(default_factory=count)
    """Of the waits, the same in all processes."""


_OUTSIDE = _Group()
_group = _OUTSIDE


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
    return _group.rank


def world() -> int:
    """Return the number of processes that work together."""
    return _group.world


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
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    # nccl would record a failure in torchrun's store, and the next attempt would stop over it.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    try:
        limit = timedelta(seconds=float(os.environ.get("NOFUSS_TIMEOUT", TIMEOUT)))
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
        _group = _OUTSIDE


def leave() -> bool:
    """End the work of several processes, in all of them; return True in the first one.

    The first process goes on alone with what needs one process, the others return. Ranks stay.
    """
    global _group
    if _group.store is not None:
        any_true(False)  # nobody goes while others still wait for a sum
        # A thread of gloo may still have to release a tensor, for which it needs the interpreter's
        # lock. In torch 2.6 the next call holds that lock while it waits for the thread, forever.
        time.sleep(0.05)
        dist.destroy_process_group()
        _group = _Group(_group.rank)
    return first()


@contextmanager
def alone() -> Iterator[None]:
    """Let one process work on its own: inside, collectives do nothing."""
    global _group
    kept, _group = _group, _Group()
    try:
        yield
    finally:
        _group = kept


@contextmanager
def in_turn() -> Iterator[None]:
    """Let the first process of each machine go first; the others then find its results cached."""
    if world() == 1:
        yield
        return
    store, key = _wait_for("turn", os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] == "0")
    try:
        with alone():
            yield
    finally:
        store.set(key, "")


def from_first(work: Callable[[], str]) -> str:
    """Return what the work of the first process returns; if it fails, all processes end."""
    if world() == 1:
        return work()
    store, key = _wait_for("first", "", first())
    if not first():
        if code := int(store.get(key)):
            raise SystemExit(code)  # the first process prints the reason
        return exchange("")[0]
    code = 1
    try:
        with alone():
            text = work()
        code = 0
    except NofussError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:  # a stop, which may have reached this process alone
        code = 130
        raise
    finally:
        store.set(key, str(code))
    return exchange(text)[0]


def _wait_for(what: str, where: str, is_first: bool) -> "tuple[Store, str]":
    """Return the store and the key that the first one sets; let the others wait until it is set.

    As long as it takes: collectives have a time limit, and no signal ends one.
    """
    store, key = _group.store, f"{what}/{next(_group.numbers)}/{where}"
    assert store is not None
    while not (is_first or store.check([key])):
        time.sleep(0.05)
    return store, key


def share(total: int, number: int | None = None) -> slice:
    """Return the part of `total` items of this process, or of that rank: neighbouring ones."""
    number = rank() if number is None else number
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


def any_true(*flags: bool) -> tuple[bool, ...]:
    """Return which of the flags are true in any process."""
    if world() == 1:
        return flags
    return tuple(all_max(torch.tensor(flags, dtype=torch.uint8)).bool().tolist())


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Set the tensors to those of the first process, in place."""
    if world() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def gather_rows(own: Tensor, total: int) -> Tensor:
    """Return the rows of all processes, (total, …), where each holds those of its `share`.

    By a sum with zeros: shares may differ in length, and adding 0 changes no number.
    """
    if world() == 1:
        return own
    whole = own.new_zeros(total, *own.shape[1:])
    whole[share(total)] = own
    return all_sum(whole)


def exchange(text: str) -> list[str]:
    """Return the texts of all processes, by rank."""
    if world() == 1:
        return [text]
    rows = rows_of_all(torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [bytes(row.tolist()).decode() for row in rows]


def check_same(what: str, describe: Callable[[], str]) -> None:
    """Raise if the processes differ in something that must be the same."""
    if world() == 1:
        return
    digests = exchange(hashlib.sha256(describe().encode(errors="backslashreplace")).hexdigest())
    if differing := [number for number, each in enumerate(digests) if each != digests[0]]:
        raise DataError(
            f"rank {differing[0]} has other {what} than rank 0; give all processes the same"
        )


def together() -> bool:
    """Return whether several processes train now: `joined`, or a script's own process group."""
    is_up = dist.is_available() and dist.is_initialized()
    return is_up and (_group is _OUTSIDE or world() > 1) and dist.get_world_size() > 1


def rows_of_all(x: Tensor) -> list[Tensor]:
    """Return the rows of all processes that are `together`, by rank; each may have its number."""
    own = torch.tensor([len(x)], device=x.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, own)
    padded = x.new_zeros(max(map(int, counts)), *x.shape[1:])
    padded[: len(x)] = x
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return [each[: int(count)] for each, count in zip(rows, counts, strict=True)]
