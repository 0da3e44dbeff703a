"""What a few marked pairs teach: the metric nearest to the present one in which they hold.

Somebody marks pairs of items as the same or not the same. Of all metrics, the one with the least
LogDet divergence from the present distance is wanted in which pairs marked the same are at most
`near` apart and the others at least `far` (information-theoretic metric learning, Davis, Kulis,
Jain, Sra & Dhillon 2007). Each pair is a rank-one change in closed form; they take turns until
nothing changes. Directions that no marked pair differs in stay as they are, so a dozen marks can't
undo what thousands of labels have taught, and with no marks nothing changes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = 10.0
"""How firmly marks count against the present metric (γ): the larger, the more exactly they hold
(LOG.md)."""
SWEEPS, ENOUGH = 100, 1e-3
"""Most rounds over the pairs, and the relative change of their weights at which they end."""


@dataclass(frozen=True)
class MarkedPairs:
    """Marked pairs: rows of embeddings (N, D)."""

    first: Tensor
    second: Tensor
    same: Tensor
    """(P,) of bool."""


def taught_map(
    embeddings: Tensor, pairs: MarkedPairs, *, near: float, far: float, slack: float = SLACK
) -> Tensor:
    """Return the map (D, D), double, whose outputs have the taught distances; symmetric.

    embeddings: (N, D) unit. near, far: distances that pairs should keep within, and beyond.
    """
    x = embeddings.double()
    differences = x[pairs.first] - x[pairs.second]  # (P, D)
    usable = differences.norm(dim=1) > 1e-6  # copies have nothing to learn from
    # Only the directions in which marked pairs differ change: solve in the space they span.
    basis, coordinates = torch.linalg.qr(differences[usable].T)  # (D, R), (R, P)
    metric = _taught_metric(coordinates.T, pairs.same[usable], near**2, far**2, slack)
    values, vectors = torch.linalg.eigh(metric)
    change = (vectors * (values.clamp_min(1e-12).sqrt() - 1)) @ vectors.T
    matrix: Tensor = torch.eye(x.shape[1], dtype=torch.float64) + basis @ change @ basis.T
    return matrix


def _taught_metric(
    differences: Tensor, is_same: Tensor, near: float, far: float, slack: float
) -> Tensor:
    """Return A (R, R) with vᵀ·A·v at most `near`, or at least `far`, for each difference v."""
    a = torch.eye(differences.shape[1], dtype=torch.float64)
    sign = torch.where(is_same, 1.0, -1.0).tolist()
    wanted = torch.where(is_same, near, far).tolist()
    weights = [0.0] * len(sign)
    for _ in range(SWEEPS):
        before = list(weights)
        for i, v in enumerate(differences):
            image = a @ v
            distance = float(v @ image)
            # A Bregman projection onto one constraint, softened by the slack: the target gives way.
            wished = sign[i] * (1 / distance - 1 / wanted[i]) * slack / (slack + 1)
            step = min(weights[i], wished)
            factor = sign[i] * step / (1 - sign[i] * step * distance)
            wanted[i] = 1 / (1 / wanted[i] + sign[i] * step / slack)
            weights[i] -= step
            a += factor * torch.outer(image, image)
        change = sum(abs(w - b) for w, b in zip(weights, before, strict=True))
        if change <= ENOUGH * sum(before):
            break
    return (a + a.T) / 2
