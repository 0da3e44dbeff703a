import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from nofuss.losses.triplet import Triplet, triplet, triplets_of_pairs


def other_library(margin: float) -> TripletMarginLoss:
    return TripletMarginLoss(margin=margin, distance=LpDistance(power=2), reducer=MeanReducer())


def test_worked_by_hand() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])  # d² from 0: 1, 9; from 1: 1, 4
    loss = triplet(x, torch.tensor([0, 0, 1]), margin=4, unit_norm=False)
    assert loss.item() == pytest.approx((0 + 1) / 2)


@pytest.mark.parametrize(
    "miner", [TripletMarginMiner(margin=0.2), MultiSimilarityMiner()], ids=["triplets", "pairs"]
)
def test_mined_triplets_and_pairs_as_the_other_library_takes_them(
    batch: tuple[Tensor, Tensor], miner: torch.nn.Module
) -> None:
    mined = miner(*batch)
    loss = Triplet(margin=0.3)(*batch, mined)
    assert loss > 0
    torch.testing.assert_close(loss, other_library(0.3)(*batch, mined))


def test_pairs_join_on_their_anchor() -> None:
    pairs = [torch.tensor(v) for v in ([0, 0, 1], [1, 2, 0], [0, 3, 0], [5, 6, 7])]
    joined = {tuple(t) for t in torch.stack(triplets_of_pairs(*pairs)).T.tolist()}
    assert joined == {(0, 1, 5), (0, 1, 7), (0, 2, 5), (0, 2, 7)}


def test_nothing_mined_is_zero_with_a_graph(batch: tuple[Tensor, Tensor]) -> None:
    x, none = batch[0].requires_grad_(), torch.tensor([], dtype=torch.int64)
    for mined in ((none,) * 3, (none,) * 4):
        loss = Triplet()(x, batch[1], mined)
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


def test_two_mined_tensors_are_refused(batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="got 2"):
        Triplet()(*batch, (batch[1], batch[1]))
