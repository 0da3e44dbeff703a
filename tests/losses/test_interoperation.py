"""One calling convention: our losses in pytorch-metric-learning's loops, its losses in ours."""

import pytest
import torch
from pytorch_metric_learning import losses, miners, trainers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nofuss.losses import INSTANCE_LOSSES, PROXY_LOSSES
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.losses.triplet import Triplet


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


@pytest.mark.parametrize(
    "criterion",
    [
        losses.ProxyNCALoss(4, 3, softmax_scale=9),
        losses.ProxyAnchorLoss(4, 3),
        losses.SoftTripleLoss(4, 3),
        losses.TripletMarginLoss(),
        losses.LiftedStructureLoss(),
        losses.NPairsLoss(),
        losses.NCALoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_their_losses_in_our_convention(criterion: nn.Module) -> None:
    x, labels = clouds()
    model = network()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.01)
    before = criterion(model(x), labels).item()
    for _ in range(10):
        optimizer.zero_grad()
        criterion(model(x), labels).backward()
        optimizer.step()
    assert criterion(model(x), labels) < before


def test_their_plain_loop_with_a_miner() -> None:
    x, labels = clouds()
    model = network()
    loss_func, mining_func = Triplet(), MINERS["triplets"]
    assert mining_func is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for _ in range(10):
        optimizer.zero_grad()
        embeddings = model(x)
        indices_tuple = mining_func(embeddings, labels)
        loss = loss_func(embeddings, labels, indices_tuple)
        loss.backward()
        optimizer.step()
        seen.append(loss_func(model(x), labels).item())
    assert seen[-1] < seen[0]


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
