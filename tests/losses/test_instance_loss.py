"""Losses over instances: pairs from a miner, references for positives and negatives."""

import pytest
import torch
from pytorch_metric_learning import miners
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices
from torch import Tensor, nn

from nofuss import NCA, SemiHardTriplet, Triplet
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES

OF_PAIRS = {"nca": NCA, "triplet": Triplet, "semi-hard": SemiHardTriplet}


def clouds() -> tuple[Tensor, Tensor]:
    """Thirty-six points in four clouds that overlap in the input space."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(36) % 4
    centers = torch.randn(4, 6, generator=generator)
    return centers[labels] + 0.7 * torch.randn(36, 6, generator=generator), labels


def our_loss(name: str) -> nn.Module:
    return PROXY_LOSSES[name](4, 3, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()


@pytest.mark.parametrize("name", [*PROXY_LOSSES, "lifted", "n-pairs", "clustering"])
def test_a_miner_where_nothing_is_to_be_mined_is_refused(name: str) -> None:
    x, labels = clouds()
    mined = miners.TripletMarginMiner()(x, labels)
    with pytest.raises(ValueError, match="miner"):
        our_loss(name)(x[:, :3], labels, mined)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_references_are_where_positives_and_negatives_come_from(name: str) -> None:
    x, labels = clouds()
    criterion = OF_PAIRS[name]()
    ref, ref_labels = x[12:], labels[12:]
    # A loop over anchors, each alone with its references: they are equally many for all.
    each = []
    for i in range(12):
        alone, own = torch.cat([x[i : i + 1], ref]), torch.cat([labels[i : i + 1], ref_labels])
        pairs = [torch.zeros(24, dtype=torch.int64), torch.arange(1, 25)]
        same = own[1:] == own[0]
        mined = pairs[0][same], pairs[1][same], pairs[0][~same], pairs[1][~same]
        each.append(criterion(alone, own, mined))
    found = criterion(x[:12], labels[:12], None, ref, ref_labels)
    torch.testing.assert_close(found, torch.stack(each).mean())
    every = get_all_pairs_indices(labels[:12], ref_labels)
    torch.testing.assert_close(criterion(x[:12], labels[:12], every, ref, ref_labels), found)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_all_pairs_of_the_batch_are_the_batch(name: str) -> None:
    x, labels = clouds()
    criterion = OF_PAIRS[name]()
    mined = get_all_pairs_indices(labels)
    torch.testing.assert_close(criterion(x, labels, mined), criterion(x, labels))


@pytest.mark.parametrize("name", [*PROXY_LOSSES, "lifted", "n-pairs", "clustering"])
def test_references_where_there_is_no_use_for_them_are_refused(name: str) -> None:
    x, labels = clouds()
    with pytest.raises(ValueError, match="ref_emb"):
        our_loss(name)(x[:, :3], labels, None, x[:, :3], labels)


def test_half_a_reference_and_another_width_are_refused() -> None:
    x, labels = clouds()
    with pytest.raises(ValueError, match="pass both"):
        Triplet()(x, labels, ref_emb=x)
    with pytest.raises(ValueError, match="ref_emb have 2"):
        Triplet()(x, labels, ref_emb=x[:, :2], ref_labels=labels)


def test_mined_pairs_need_no_labels() -> None:
    x, labels = clouds()
    mined = get_all_pairs_indices(labels)
    assert Triplet()(x, indices_tuple=mined) == Triplet()(x, labels, mined)
    with pytest.raises(ValueError, match="no labels"):
        Triplet()(x)


def test_anchors_without_negatives_leave_finite_gradients() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reference, others = x.detach()[:4] + 0.1, torch.tensor([0, 0, 0, 0])
    loss = NCA()(x, torch.tensor([0, 0, 1, 1, 2, 2]), None, reference, others)
    loss.backward()
    assert loss == 0  # no positive has a negative beside it
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("criterion", [NCA(), Triplet(), SemiHardTriplet()])
def test_references_may_be_more_precise(criterion: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    x, references = torch.randn(6, 3, generator=generator), torch.randn(8, 3, generator=generator)
    labels, others = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(8) % 3
    expected = criterion(x, labels, None, references, others)
    found = criterion(x, labels, None, references.double(), others)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected)
