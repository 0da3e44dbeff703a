"""A room of their own for the processes that torchrun has started just now.

torchrun's store outlives its processes. Who came in place of a process that was lost must not find
the addresses that the dead have left there, and there is no name that all have in common and no
earlier attempt had: of several machines each counts its restarts by itself. So they agree on one.

    every other rank   hello/RANK ← a nonce of its own; waits for welcome/NONCE
    rank 0             answers each new nonce: welcome/NONCE ← the room
    every other rank   ROOM/NONCE ← it has come
    rank 0             waits until all whose nonces stand there now have come

What was left by the dead gets an answer too, which nobody reads, and who dies on the way and is
started again says hello anew.
"""

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PAUSE = 0.02


def own_room(store: "Store", rank: int, world: int, patience: float) -> "Store":
    """The part of a store that those who meet now share with nobody; all call it."""
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
    """Not in the store's own way of waiting, which no signal ends."""
    end = time.monotonic() + patience
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"some have not come within {patience:g} s")
        time.sleep(PAUSE)
