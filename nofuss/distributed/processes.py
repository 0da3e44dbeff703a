"""Several processes that work as one: ranks, collectives, and errors that name a missing process.

torchrun starts the processes and gives each its rank; all then run the same program in step. Every
collective of the library is in this file. A program that has not called `joined` is alone: then
each function returns its input, and torch.distributed is not used.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nofuss.distributed.meeting import own_room
from nofuss.distributed.network import describe_meeting, interface_to_peers
from nofuss.errors import DataError, NofussError, ProcessError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE = 600.0
"""Seconds after which a process that does not answer counts as hung; $NOFUSS_TIMEOUT."""
ROLL_CALL = 10.0
"""Seconds in which processes must report that they are present, once one is missing."""


@dataclass(frozen=True)
class _Group:
    rank: int
    world: int
    store: "Store"
    patience: float


_group: _Group | None = None


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
    """Return the number of processes."""
    return _group.world if _group else 1


def first() -> bool:
    """Return whether this process is rank 0, which writes files and prints."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[str]:
    """Join the other processes of torchrun; yields a line that says how, empty when alone."""
    global _group
    if not under_torchrun():
        yield ""
        return
    patience = _patience()
    if interface := interface_to_peers():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    limit, nccl = timedelta(seconds=patience), dist.is_nccl_available()
    # nccl would record a failure in torchrun's store, and the next attempt would stop over it.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    try:
        store, number, count = next(iter(rendezvous("env://", timeout=limit)))
        store = own_room(store, number, count, 2 * patience)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and nccl else "gloo",
            store=store,
            rank=number,
            world_size=count,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ProcessError(
            f"rank {os.environ['RANK']} can't reach the other processes: {reason}"
        ) from error
    _group = _Group(number, count, store, patience)
    try:
        with _named_failures():
            yield describe_meeting()
    finally:
        _group = None
    # A thread of gloo may still have to release a tensor, for which it needs the interpreter's
    # lock. In torch 2.6 the next line holds that lock while it waits for the thread, forever.
    time.sleep(0.05)
    dist.destroy_process_group()


def _patience() -> float:
    given = os.environ.get("NOFUSS_TIMEOUT", str(PATIENCE))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"NOFUSS_TIMEOUT is {given!r}; expected seconds, a number above 0")
    return seconds


@contextmanager
def alone() -> Iterator[None]:
    """Let one process work on its own: inside, collectives do nothing."""
    global _group
    kept, _group = _group, None
    try:
        yield
    finally:
        _group = kept


@contextmanager
def in_turn() -> Iterator[None]:
    """Let the first process of each machine go first; the others then find its results cached."""
    if _group is None:
        yield
        return
    node, local = os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"])
    counter = f"turn/{node}"
    turn = _group.store.add(f"{counter}/{local}", 1)
    done = f"{counter}/done/{turn}"
    while local and not _group.store.check([done]):  # no time limit, and signals interrupt it
        time.sleep(0.1)
    with alone():
        yield
    if not local:
        _group.store.set(done, "")


def on_first(work: Callable[[], str]) -> str:
    """Return what the work of the first process returns; if it fails, all processes end."""
    if _group is None:
        return work()
    if not first():
        code, _, text = exchange("")[0].partition(" ")
        if code != "0":
            raise SystemExit(int(code))  # the first process prints the reason
        return text
    try:
        with alone():
            text = work()
    except Exception as error:
        exchange(f"{error.exit_code if isinstance(error, NofussError) else 1} ")
        raise
    exchange(f"0 {text}")
    return text


def share(count: int) -> slice:
    """Return this process's part of `count` items: neighbouring ones, as evenly as possible."""
    return slice(rank() * count // world(), (rank() + 1) * count // world())


def all_sum(x: Tensor) -> Tensor:
    """Sum x over all processes, in place."""
    if _group:
        dist.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """Take the maximum of x over all processes, in place."""
    if _group:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def all_min(x: Tensor) -> Tensor:
    """Take the minimum of x over all processes, in place."""
    if _group:
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return x


def gather_rows(own: Tensor, count: int) -> Tensor:
    """Return the rows of all processes, (count, …), where each holds those of its `share`.

    By a sum with zeros: shares may differ in length, and adding 0 changes no number.
    """
    if not _group:
        return own
    whole = own.new_empty(count, *own.shape[1:])
    whole[share(count)] = own
    return merge_rows(whole, share(count))


def merge_rows(x: Tensor, own: slice) -> Tensor:
    """Fill x in place with each process's `own` rows."""
    if _group:
        x[: own.start] = 0
        x[own.stop :] = 0
        all_sum(x)
    return x


def any_true(*flags: bool) -> tuple[bool, ...]:
    """Return which of the flags are true in any process."""
    if not _group:
        return flags
    return tuple(all_max(torch.tensor(flags, dtype=torch.uint8)).bool().tolist())


def exchange(text: str) -> list[str]:
    """Return the texts of all processes, by rank."""
    if not _group:
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
    if not _group:
        return
    digests = exchange(hashlib.sha256(describe().encode(errors="backslashreplace")).hexdigest())
    if differing := [number for number, each in enumerate(digests) if each != digests[0]]:
        raise DataError(
            f"rank {differing[0]} has other {what} than rank 0; give all processes the same"
        )


@contextmanager
def _named_failures() -> Iterator[None]:
    """Turn a failed collective into one line that names the missing processes."""
    try:
        yield
    except RuntimeError as error:  # gloo's errors have no type of their own
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        _explain(error)


def _explain(error: RuntimeError) -> NoReturn:
    assert _group is not None
    cure = "the last checkpoint is complete; resume from it with --resume"
    reason = str(error).splitlines()[0]
    if not re.search("timed out|timing out|timeout", reason, re.IGNORECASE):
        raise ProcessError(f"another process has ended ({reason}); {cure}") from error
    missing = ", ".join(map(str, _roll_call(_group)))
    who = f"rank {missing} has" if missing else "a process had"
    raise ProcessError(
        f"{who} not answered for {_group.patience:g} s (of {_group.world} processes): it hangs, or "
        f"the link to it is cut; {cure} (NOFUSS_TIMEOUT=seconds waits longer)"
    ) from error


def _roll_call(group: _Group) -> list[int]:
    """Return the ranks that do not report within `ROLL_CALL` seconds that they are present."""
    present = {group.rank}

    def listen() -> None:
        group.store.set(f"here/{group.rank}", "")
        while len(present) < group.world:
            present.update(r for r in range(group.world) if group.store.check([f"here/{r}"]))
            time.sleep(0.2)

    # In a daemon thread: if the store is behind the cut link, a request to it never returns.
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(ROLL_CALL)
    return [r for r in range(group.world) if r not in present]
