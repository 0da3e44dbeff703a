"""Where pytorch-metric-learning's defaults differ from ours, and by how much, on one batch.

python examples/compare_with_pml.py
"""

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn

from nofuss import (
    NCA,
    LiftedStructure,
    NPairs,
    ProxyAnchor,
    ProxyNCA,
    ProxyNCAPlusPlus,
    SoftTriple,
    Triplet,
)

generator = torch.Generator().manual_seed(0)
labels = torch.arange(32) % 8
x = torch.randn(32, 16, generator=generator)
opposite = ProxyNCA(8, 16, seed=0).proxies[:1].detach() * -1  # the worst place for class 0


def same_proxies(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    """Give their loss our proxies."""
    name = "fc" if isinstance(theirs, pml.SoftTripleLoss) else "proxies"
    values = ours.get_parameter("proxies").detach()
    theirs.load_state_dict({name: values.T if name == "fc" else values})
    return theirs


def row(what: str, ours: nn.Module, theirs: nn.Module, x: Tensor = x, c: Tensor = labels) -> None:
    """One line of the table."""
    if any(True for _ in ours.parameters()):
        same_proxies(theirs, ours)
    a, b = ours(x, c).item(), theirs(x, c).item()
    difference = "equal" if abs(b - a) <= 1e-5 * abs(a) else f"{b - a:+.2f}"
    print(f"| {what} | {a:.2f} | {b:.2f} | {difference} |")


print("| ours / theirs | ours | theirs | theirs − ours |\n|---|---|---|---|")
print("| **equal once the options are** | | | |")
row(
    "`ProxyNCAPlusPlus(temperature=1/9)` / `ProxyNCALoss(softmax_scale=9)`",
    ProxyNCAPlusPlus(8, 16, temperature=1 / 9, seed=0),
    pml.ProxyNCALoss(8, 16, softmax_scale=9),
)
row("`ProxyAnchor()` / `ProxyAnchorLoss()`", ProxyAnchor(8, 16, seed=0), pml.ProxyAnchorLoss(8, 16))
row(
    "`SoftTriple(tau=0)` / `SoftTripleLoss()`",
    SoftTriple(8, 16, tau=0, seed=0),
    pml.SoftTripleLoss(8, 16),
)
row(
    "`Triplet()` / `TripletMarginLoss(margin=0.1)`, squared distance, `MeanReducer`",
    Triplet(),
    pml.TripletMarginLoss(margin=0.1, distance=LpDistance(power=2), reducer=MeanReducer()),
)
row(
    "`LiftedStructure()` / `LiftedStructureLoss()`, `normalize_embeddings=False`",
    LiftedStructure(),
    pml.LiftedStructureLoss(distance=LpDistance(normalize_embeddings=False)),
)
row(
    "`NPairs(l2=0)` / `NPairsLoss()`, `normalize_embeddings=False`",
    NPairs(l2=0),
    pml.NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False)),
)
print("| **different** | | | |")
row(
    "positive in their denominator: `ProxyNCA(scale=18)` / `ProxyNCALoss(softmax_scale=9)`",
    ProxyNCA(8, 16, seed=0),
    pml.ProxyNCALoss(8, 16, softmax_scale=9),
)
row(
    "their scale is 1: `ProxyNCA()` / `ProxyNCALoss()`",
    ProxyNCA(8, 16, seed=0),
    pml.ProxyNCALoss(8, 16),
)
row(
    "one point opposite its proxy, scale 128: `ProxyNCAPlusPlus(temperature=1/64)` / "
    "`ProxyNCALoss(softmax_scale=64)`",
    ProxyNCAPlusPlus(8, 16, temperature=1 / 64, seed=0),
    pml.ProxyNCALoss(8, 16, softmax_scale=64),
    opposite,
    labels[:1],
)
row(
    "positives in their denominator and summed: `NCA(scale=18)` / `NCALoss(softmax_scale=9)`",
    NCA(),
    pml.NCALoss(softmax_scale=9),
)
row(
    "no pull between centers: `SoftTriple()` / `SoftTripleLoss()`",
    SoftTriple(8, 16, seed=0),
    pml.SoftTripleLoss(8, 16),
)
row(
    "not squared, mean of the non-zero: `Triplet()` / `TripletMarginLoss(margin=0.1)`",
    Triplet(),
    pml.TripletMarginLoss(margin=0.1),
)
row(
    "normalised: `LiftedStructure()` / `LiftedStructureLoss()`",
    LiftedStructure(),
    pml.LiftedStructureLoss(),
)
row("normalised, no l2: `NPairs()` / `NPairsLoss()`", NPairs(), pml.NPairsLoss())
