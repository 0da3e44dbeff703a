"""Sampled negatives: what is in the sample, and how far the loss is from the full one."""

import math

import pytest
import torch
from torch.nn import functional as F

from nofuss.losses.fused import fused_proxy_nca
from nofuss.losses.fused_sampling import sample_negatives, sampled_proxy_nca


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("share", [1e-6, 0.1, 1.0])
def test_a_sample_is_sorted_unique_and_holds_the_positives(share: float) -> None:
    positive = torch.tensor([7, 7, 99, 0])
    rows = sample_negatives(100, positive, share=share, generator=seeded())
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert set(positive.tolist()) <= set(rows.tolist())
    assert rows[0] >= 0
    assert rows[-1] < 100


@pytest.mark.parametrize("only", [0, 99])
def test_one_label_still_meets_a_negative(only: int) -> None:
    for seed in range(20):
        rows = sample_negatives(100, torch.tensor([only]), share=1e-9, generator=seeded(seed))
        assert len(rows) == 2
        assert only in rows


def test_the_seed_decides_and_the_share_is_met() -> None:
    positive = torch.tensor([3])
    first, again, other = (
        sample_negatives(20_000, positive, share=0.1, generator=seeded(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == pytest.approx(2000, abs=5 * math.sqrt(20_000 * 0.1 * 0.9))


def test_share_one_is_the_full_loss_and_gradient() -> None:
    x = F.normalize(torch.randn(6, 8, generator=seeded()))
    p = torch.randn(40, 8, generator=seeded(1), requires_grad=True)
    positive = torch.tensor([0, 5, 5, 39, 20, 1])
    full = fused_proxy_nca(x, positive, p, scale=18.0)
    sampled = sampled_proxy_nca(x, positive, p, scale=18.0, share=1.0, corrected=True)
    torch.testing.assert_close(sampled, full)
    torch.testing.assert_close(torch.autograd.grad(sampled, p), torch.autograd.grad(full, p))


def test_bias_is_the_log_of_the_share_and_is_corrected() -> None:
    x = F.normalize(torch.randn(16, 32, generator=seeded()))
    p = torch.randn(4000, 32, generator=seeded(1))
    positive = torch.arange(16)
    full = fused_proxy_nca(x, positive, p, scale=8.0)
    raw, corrected = (
        torch.stack(
            [
                sampled_proxy_nca(
                    x, positive, p, scale=8.0, share=0.1, generator=seeded(s), corrected=c
                )
                for s in range(30)
            ]
        ).mean()
        for c in (False, True)
    )
    assert (raw - full).item() == pytest.approx(math.log(0.1), abs=0.05)
    assert (corrected - full).item() == pytest.approx(0, abs=0.02)


def test_only_sampled_proxies_get_a_gradient_dense_or_sparse() -> None:
    x = F.normalize(torch.randn(4, 8, generator=seeded()))
    p = torch.randn(500, 8, generator=seeded(1), requires_grad=True)
    positive = torch.tensor([0, 5, 5, 499])
    rows = sample_negatives(500, positive, share=0.1, generator=seeded(3))
    dense, sparse = (
        torch.autograd.grad(
            sampled_proxy_nca(
                x, positive, p, scale=9.0, share=0.1, generator=seeded(3), sparse=kind
            ),
            p,
        )[0]
        for kind in (False, True)
    )
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)
    assert torch.equal(dense.abs().sum(1).nonzero().squeeze(1), rows)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        sample_negatives(10, torch.tensor([0]), share=share)
