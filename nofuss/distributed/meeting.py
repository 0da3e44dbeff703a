"""A fresh part of torchrun's store for the processes that it has just started.

The store outlives the processes. After a restart they must not read the addresses that terminated
processes have left in it, and no prefix is both known to all and new: each machine counts its
restarts separately. So the processes agree on a random prefix, the room.

    every other rank   sets hello/RANK to a nonce and waits for welcome/NONCE
    rank 0             answers each new nonce: sets welcome/NONCE to the room
    every other rank   sets ROOM/NONCE: it has arrived
    rank 0             waits until the ranks of all current nonces have arrived

A nonce left by a terminated process gets an answer too, which is never read; a process that
terminates on the way and is started again sets a new nonce.
"""

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PAUSE = 0.02  # seconds between two looks at the store


def own_room(store: "Store", rank: int, world: int, patience: float) -> "Store":
    """Return a part of the store that only the current processes use; all of them call it."""
    name = _receive(store, world, patience) if rank == 0 else _ask(store, rank, patience)
    room: Store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return room


def _receive(store: "Store", world: int, patience: float) -> str:
    room, answered = uuid.uuid4().hex, set[str]()

    def all_there() -> bool:
        hellos = [f"hello/{r}" for r in range(1, world)]
        nonces = [store.get(key).decode() for key in hellos if store.check([key])]
        for nonce in nonces:
            if nonce not in answered:
                store.set(f"welcome/{nonce}", room)
                answered.add(nonce)
        return len(nonces) == len(hellos) and store.check([f"{room}/{n}" for n in nonces])

    _wait(all_there, patience)
    return room


def _ask(store: "Store", rank: int, patience: float) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    _wait(lambda: store.check([f"welcome/{nonce}"]), patience)
    room = store.get(f"welcome/{nonce}").decode()
    store.set(f"{room}/{nonce}", "")
    return room


def _wait(done: Callable[[], bool], patience: float) -> None:
    """Poll until done: the store's own way of waiting can't be interrupted by a signal."""
    end = time.monotonic() + patience
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"some processes have not arrived within {patience:g} s")
        time.sleep(PAUSE)
