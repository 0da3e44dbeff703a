"""Shards: whatever the number of processes, the first proxies are the same rows of one draw."""

from itertools import pairwise

import pytest
import torch

from nofuss.distributed.shard import CHUNK, Shard, first_proxies


@pytest.mark.parametrize(
    ("total", "dim"), [(7, 3), (CHUNK, 5), (CHUNK + 1, 5), (2 * CHUNK + 3, 3), (3 * CHUNK, 1)]
)
def test_rows_of_a_shard_are_rows_of_the_whole(total: int, dim: int) -> None:
    whole = first_proxies(total, dim, None, torch.Generator().manual_seed(4))
    cuts = [0, total // 3, total // 3 + 1, total]
    for start, stop in pairwise(cuts):
        generator = torch.Generator().manual_seed(4)
        own = first_proxies(total, dim, Shard(start, stop, total), generator)
        assert torch.equal(own, whole[start:stop])


def test_which_rows_a_shard_holds() -> None:
    shard = Shard(3, 5, 9)
    assert shard.holds(torch.arange(9)).nonzero().squeeze(1).tolist() == [3, 4]
    proxies = torch.arange(6.0).view(2, 3)
    assert shard.take(proxies, torch.tensor([4, 0])).tolist() == [[3.0, 4.0, 5.0], [0.0, 0.0, 0.0]]
