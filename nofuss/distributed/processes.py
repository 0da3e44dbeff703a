"""Several processes as one: who am I, what all know together, and who is missing.

torchrun starts the processes and tells each its rank; all then run the same program in step. Every
collective of the library goes through here. A program that has not called `joined` is alone: then
each function gives back what it was given, and nothing of torch.distributed is touched.
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
from nofuss.distributed.network import how_they_met, towards_the_others
from nofuss.errors import DataError, NofussError, ProcessError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PATIENCE = 600.0
"""Seconds after which a process that does not answer counts as hung; $NOFUSS_TIMEOUT."""
ROLL_CALL = 10.0
"""Seconds that the others have to say that they are there, once somebody is missed."""


@dataclass(frozen=True)
class _Group:
    rank: int
    world: int
    store: "Store"
    patience: float


_group: _Group | None = None


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted() -> bool:
    """Whether torchrun started any of the processes in place of one that was lost."""
    return any_true(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0)[0]


def may_restart() -> bool:
    """Whether torchrun was told to bring processes back (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def rank() -> int:
    """Which process this is, from 0."""
    return _group.rank if _group else 0


def world() -> int:
    """How many processes there are."""
    return _group.world if _group else 1


def first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[str]:
    """Meet the other processes of torchrun; hands out a line that says how, empty when alone."""
    global _group
    if not under_torchrun():
        yield ""
        return
    patience = _patience()
    if interface := towards_the_others():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    limit, nccl = timedelta(seconds=patience), dist.is_nccl_available()
    # nccl would leave word of a failure in torchrun's store, for the next attempt to end over.
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
        raise ProcessError(f"rank {os.environ['RANK']} can't meet the others: {reason}") from error
    _group = _Group(number, count, store, patience)
    try:
        with _named_failures():
            yield how_they_met()
    finally:
        _group = None
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
    """For work of one process amid the others: inside, there are no others."""
    global _group
    kept, _group = _group, None
    try:
        yield
    finally:
        _group = kept


@contextmanager
def in_turn() -> Iterator[None]:
    """The first process of each machine goes ahead alone; what it leaves in a cache serves all."""
    if _group is None:
        yield
        return
    node, local = os.environ["GROUP_RANK"], int(os.environ["LOCAL_RANK"])
    counter = f"turn/{node}"
    turn = _group.store.add(f"{counter}/{local}", 1)
    done = f"{counter}/done/{turn}"
    while local and not _group.store.check([done]):  # as long as it takes, and open to signals
        time.sleep(0.1)
    with alone():
        yield
    if not local:
        _group.store.set(done, "")


def on_first(work: Callable[[], str]) -> str:
    """What the work of the first process returns; where it fails, the others end with it."""
    if _group is None:
        return work()
    if not first():
        code, _, text = exchange("")[0].partition(" ")
        if code != "0":
            raise SystemExit(int(code))  # the first one says why
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
    """The part of `count` things that is this process's own: neighbours, as even as can be."""
    return slice(rank() * count // world(), (rank() + 1) * count // world())


def all_sum(x: Tensor) -> Tensor:
    """The sum of everyone's x, in place."""
    if _group:
        dist.all_reduce(x)
    return x


def all_max(x: Tensor) -> Tensor:
    """The maximum of everyone's x, in place."""
    if _group:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def all_min(x: Tensor) -> Tensor:
    """The minimum of everyone's x, in place."""
    if _group:
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return x


def gather_rows(own: Tensor, count: int) -> Tensor:
    """The rows of all processes, (count, …), where each holds those of its `share`.

    A sum with zeros: shares may differ in length, and the bits are those of the owner.
    """
    if not _group:
        return own
    whole = own.new_empty(count, *own.shape[1:])
    whole[share(count)] = own
    return merge_rows(whole, share(count))


def merge_rows(x: Tensor, own: slice) -> Tensor:
    """Rows of x from the process whose own they are, in place."""
    if _group:
        x[: own.start] = 0
        x[own.stop :] = 0
        all_sum(x)
    return x


def any_true(*flags: bool) -> tuple[bool, ...]:
    """Which of the flags are up in any process."""
    if not _group:
        return flags
    return tuple(all_max(torch.tensor(flags, dtype=torch.uint8)).bool().tolist())


def exchange(text: str) -> list[str]:
    """The texts of all processes, by rank."""
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


def check_same(what: str, told: Callable[[], str]) -> None:
    """Refuse to go on where the processes differ in something that must be the same."""
    if not _group:
        return
    seen = exchange(hashlib.sha256(told().encode(errors="backslashreplace")).hexdigest())
    if other := [number for number, each in enumerate(seen) if each != seen[0]]:
        raise DataError(f"rank {other[0]} sees other {what} than rank 0; give all the same")


@contextmanager
def _named_failures() -> Iterator[None]:
    """Turn a collective that failed into a line that says who was missed."""
    try:
        yield
    except RuntimeError as error:  # gloo's errors have no type of their own
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        _explain(error)


def _explain(error: RuntimeError) -> NoReturn:
    assert _group is not None
    whole = "the last checkpoint is whole, --resume goes on from it"
    reason = str(error).splitlines()[0]
    if not re.search("timed out|timing out|timeout", reason, re.IGNORECASE):
        raise ProcessError(f"another process is gone ({reason}); {whole}") from error
    missing = ", ".join(map(str, _roll_call(_group)))
    who = f"rank {missing} has" if missing else "a process had"
    raise ProcessError(
        f"{who} not answered for {_group.patience:g} s (of {_group.world} processes): it hangs, or "
        f"the link to it is cut; {whole} (NOFUSS_TIMEOUT=seconds waits longer)"
    ) from error


def _roll_call(group: _Group) -> list[int]:
    """Who does not say within `ROLL_CALL` seconds that he is there."""
    present = {group.rank}

    def listen() -> None:
        group.store.set(f"here/{group.rank}", "")
        while len(present) < group.world:
            present.update(r for r in range(group.world) if group.store.check([f"here/{r}"]))
            time.sleep(0.2)

    # In a thread of its own: where the store is beyond a cut link, asking it never ends.
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(ROLL_CALL)
    return [r for r in range(group.world) if r not in present]
