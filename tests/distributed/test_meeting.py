"""Ranks that agree on a room, in threads over one store, which remembers everyone who failed."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nofuss.distributed.meeting import own_room


def meet(store: dist.Store, ranks: list[int], world: int, patience: float) -> list[bytes | str]:
    """What rank 0 wrote into the room, as each of them finds it there, or why it gave up."""
    store.set_timeout(timedelta(seconds=patience))

    def one(rank: int) -> bytes | str:
        try:
            room = own_room(store, rank, world, patience)
            if rank == 0:
                room.set("address", str(store.add("attempt", 1)))
            return room.get("address")
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_attempt_has_a_room_of_its_own(world: int) -> None:
    store = dist.HashStore()
    for attempt in range(1, 5):
        assert meet(store, list(range(world)), world, 20) == [b"%d" % attempt] * world


def test_those_who_never_met_leave_nothing_that_misleads() -> None:
    store = dist.HashStore()
    assert (
        meet(store, [1, 2], 3, 0.1) == ["some processes have not arrived within 0.1 s"] * 2
    )  # no rank 0
    assert (
        meet(store, [0, 2], 3, 0.3)[0] == "some processes have not arrived within 0.3 s"
    )  # no rank 1
    assert (
        meet(store, [0, 1], 3, 0.3)[0] == "some processes have not arrived within 0.3 s"
    )  # no rank 2
    assert meet(store, [2, 1, 0], 3, 20) == [b"1"] * 3


def test_one_that_is_started_again_while_others_are_awaited() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        receiving = pool.submit(own_room, store, 0, 3, 20)
        own_room(store, 2, 3, 20)  # is let in, and dies
        rooms = [own_room(store, rank, 3, 20) for rank in (2, 1)]
        receiving.result().set("address", "here")
    assert [room.get("address") for room in rooms] == [b"here"] * 2
