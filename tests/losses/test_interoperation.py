"""One calling convention: our losses in pytorch-metric-learning's loops, its losses in ours."""

import pytest
import torch
from pytorch_metric_learning import losses, miners, trainers
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nofuss import NCA, ProxyNCA, SemiHardTriplet, Triplet
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES


def clouds() -> tuple[Tensor, Tensor]:
    """Thirty-six points in four clouds that overlap in the input space."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(36) % 4
    centers = torch.randn(4, 6, generator=generator)
    return centers[labels] + 0.7 * torch.randn(36, 6, generator=generator), labels


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 3)


def our_loss(name: str) -> nn.Module:
    return PROXY_LOSSES[name](4, 3, seed=0) if name in PROXY_LOSSES else INSTANCE_LOSSES[name]()


MINERS = {
    "no miner": None,
    "triplets": miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard"),
    "pairs": miners.MultiSimilarityMiner(epsilon=0.1),
}


# Its progress bar prints the loss without detaching it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(
    ("name", "miner"),
    [(n, "no miner") for n in [*PROXY_LOSSES, *INSTANCE_LOSSES]]
    + [("triplet", "triplets"), ("triplet", "pairs")],
)
def test_our_losses_in_their_trainer(name: str, miner: str) -> None:
    x, labels = clouds()
    model, criterion = network(), our_loss(name)
    before = criterion(model(x), labels)
    optimizers = {"trunk_optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}
    if name in PROXY_LOSSES:
        optimizers["metric_loss_optimizer"] = torch.optim.Adam(criterion.parameters(), lr=0.1)
    mining = MINERS[miner]
    trainer = trainers.MetricLossOnly(
        models={"trunk": model},
        optimizers=optimizers,
        batch_size=18,
        loss_funcs={"metric_loss": criterion},
        dataset=TensorDataset(x, labels),
        mining_funcs={} if mining is None else {"tuple_miner": mining},
        data_device=torch.device("cpu"),
        dataloader_num_workers=0,
    )
    with torch.random.fork_rng():  # the trainer shuffles with the global generator
        torch.manual_seed(0)
        trainer.train(num_epochs=5)
    assert criterion(model(x), labels) < before


@pytest.mark.parametrize("name", [*PROXY_LOSSES, "lifted", "n-pairs", "clustering"])
def test_a_miner_where_nothing_is_to_be_mined_is_refused(name: str) -> None:
    x, labels = clouds()
    mined = miners.TripletMarginMiner()(x, labels)
    with pytest.raises(ValueError, match="leave out the miner"):
        our_loss(name)(x[:, :3], labels, mined)


def test_their_wrapper_of_several_losses_takes_ours() -> None:
    x, labels = clouds()
    ours, theirs = ProxyNCA(4, 6, seed=0), losses.NPairsLoss()
    both = losses.MultipleLosses([ours, theirs], weights=[1, 0.5])
    torch.testing.assert_close(both(x, labels), ours(x, labels) + theirs(x, labels) / 2)


OF_PAIRS = {"nca": NCA, "triplet": Triplet, "semi-hard": SemiHardTriplet}


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
    with pytest.raises(ValueError, match="ref_emb have 2 columns but embeddings 6"):
        Triplet()(x, labels, ref_emb=x[:, :2], ref_labels=labels)


class Memory(losses.CrossBatchMemory):
    """Theirs, which goes by the name of a loss's class: with the names of ours."""

    @staticmethod
    def supported_losses() -> list[str]:
        return ["Triplet", "NCA", "SemiHardTriplet"]


class Pairwise(losses.SelfSupervisedLoss):
    """Likewise; symmetric, it takes every loss over instances."""

    @staticmethod
    def supported_losses() -> list[str]:
        return [loss.__name__ for loss in INSTANCE_LOSSES.values()]


def test_their_cross_batch_memory_equals_its_own_triplet_loss() -> None:
    x, labels = clouds()
    distance = LpDistance(power=2)
    theirs = losses.TripletMarginLoss(margin=0.1, distance=distance, reducer=MeanReducer())
    ours = Memory(Triplet(), 6, memory_size=80)
    other = losses.CrossBatchMemory(theirs, 6, memory_size=80)
    for shift in range(3):
        torch.testing.assert_close(ours(x + shift, labels), other(x + shift, labels))


@pytest.mark.parametrize("name", INSTANCE_LOSSES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_their_self_supervised_loss(name: str, symmetric: bool) -> None:
    x = clouds()[0][:8]
    other = x + 0.1 * x.flip(0)
    criterion = INSTANCE_LOSSES[name]()
    wrapped = Pairwise(criterion, symmetric=symmetric)
    if not symmetric and name not in OF_PAIRS:
        with pytest.raises(ValueError, match="leave out the miner and ref_emb"):
            wrapped(x, other)
        return
    two = torch.arange(8).repeat(2)
    expected = (
        criterion(torch.cat([x, other]), two)
        if symmetric
        else criterion(x, two[:8], None, other, two[:8])
    )
    torch.testing.assert_close(wrapped(x, other), expected)


@pytest.mark.parametrize("criterion", [Triplet(), SemiHardTriplet(), NCA()])
def test_the_batch_as_its_own_reference_is_the_batch(criterion: nn.Module) -> None:
    x, labels = clouds()
    assert criterion(x, labels, ref_emb=x, ref_labels=labels) == criterion(x, labels)


def test_mined_pairs_need_no_labels() -> None:
    x, labels = clouds()
    mined = get_all_pairs_indices(labels)
    assert Triplet()(x, indices_tuple=mined) == Triplet()(x, labels, mined)
    with pytest.raises(ValueError, match="got no labels; pass them, or the pairs"):
        Triplet()(x)
