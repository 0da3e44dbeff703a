"""One calling convention: our losses in pytorch-metric-learning's loops, its losses in ours."""

import pytest
import torch
from pytorch_metric_learning import losses, miners, trainers
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from torch import nn
from torch.utils.data import TensorDataset

from nofuss import ProxyNCA, Triplet
from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from tests.losses.test_instance_loss import OF_PAIRS, clouds, our_loss


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 3)


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
    [(n, "no miner") for n in ("proxy-nca", "soft-triple", "clustering", "n-pairs")]
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


def test_their_wrapper_of_several_losses_takes_ours() -> None:
    x, labels = clouds()
    ours, theirs = ProxyNCA(4, 6, seed=0), losses.NPairsLoss()
    both = losses.MultipleLosses([ours, theirs], weights=[1, 0.5])
    torch.testing.assert_close(both(x, labels), ours(x, labels) + theirs(x, labels) / 2)


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
        with pytest.raises(ValueError, match="ref_emb"):
            wrapped(x, other)
        return
    two = torch.arange(8).repeat(2)
    expected = (
        criterion(torch.cat([x, other]), two)
        if symmetric
        else criterion(x, two[:8], None, other, two[:8])
    )
    torch.testing.assert_close(wrapped(x, other), expected)
