"""Structured clustering by facility location (Song et al. 2017): a baseline of the paper.

A clustering of the batch is a set S of medoids. Its score is the facility location function
F(X, S) = −Σᵢ min_{j∈S} |xᵢ − xⱼ|; the score of the true clustering y* takes the best medoid
of every class. The loss asks the true clustering to beat every other by a margin that grows
with how different the other is, Δ = 1 − NMI:

    [ max_S { F(X, S) + γ Δ(g(S), y*) } − F̃(X, y*) ]₊

The inner maximum (loss-augmented inference) is searched as there: greedily, one medoid at a
time, then refined by swapping the medoid of a cluster with another of its members while
that helps. The search runs without gradients; the two scores it ends with carry them.
"""

import torch
from torch import Tensor

from nofuss.geometry import distances, normalize
from nofuss.losses.inputs import zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss


def structured_clustering(
    embeddings: Tensor, labels: Tensor, *, gamma: float = 1.0, refinements: int = 5
) -> Tensor:
    """[max_S {F(X,S) + γΔ(S,y*)} − F̃(X,y*)]₊ on unit directions, Eq. 5 of Song et al. 2017."""
    classes, truth = torch.unique(labels, return_inverse=True)
    if len(classes) < 2 or len(classes) == len(labels):
        return zero_with_graph(embeddings)
    x = normalize(embeddings)
    itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
    # A medoid is at distance 0 from itself; the root of a rounding error is not.
    d = distances(x, x).masked_fill(itself, 0)  # (B, B)
    medoids = loss_augmented_medoids(d.detach(), truth, gamma=gamma, refinements=refinements)
    assigned = d.detach()[:, medoids].argmin(1)
    margin = gamma * (1 - _nmi(assigned[None], truth, len(classes)))[0]
    to_medoid = d[torch.arange(len(d), device=d.device), medoids[assigned]]
    return (margin.to(d.dtype) - to_medoid.sum() + _best_medoid_cost(d, truth)).clamp_min(0)


@torch.no_grad()
def loss_augmented_medoids(d: Tensor, truth: Tensor, *, gamma: float, refinements: int) -> Tensor:
    """Rows of the medoids S, |S| = classes, that (greedily) maximise F(X,S) + γΔ(S,y*)."""
    k = int(truth.max()) + 1
    items = torch.arange(len(d), device=d.device)
    medoids = items[:0]
    cost = torch.full_like(d[0], torch.inf)  # distance to the closest medoid so far
    assigned = torch.zeros_like(truth)
    for size in range(k):  # greedy: every item is tried as the next medoid, all at once
        closer = d < cost  # (B candidates, B items); d is symmetric
        guess = torch.where(closer, size, assigned)
        score = gamma * (1 - _nmi(guess, truth, k)) - torch.minimum(d, cost).sum(1)
        score[medoids] = -torch.inf
        best = score.argmax()
        medoids = torch.cat([medoids, best[None]])
        cost, assigned = torch.minimum(d[best], cost), guess[best]
    score = _augmented_scores(d, medoids[None], truth, gamma)[0]
    for _ in range(refinements):
        before = score
        for cluster in range(k):
            members = items[d[:, medoids].argmin(1) == cluster]
            tries = medoids.repeat(len(members), 1)  # (members, k)
            tries[:, cluster] = members
            scores = _augmented_scores(d, tries, truth, gamma)
            if len(scores) and scores.max() > score:
                score, medoids = scores.max(), tries[scores.argmax()]
        if score == before:
            break
    return medoids


def _augmented_scores(d: Tensor, medoids: Tensor, truth: Tensor, gamma: float) -> Tensor:
    """F(X,S) + γΔ(S,y*) for each row S of medoids (J, K)."""
    cost, assigned = d[:, medoids].min(2)  # (B, J)
    return gamma * (1 - _nmi(assigned.T, truth, medoids.shape[1])) - cost.sum(0)


def _best_medoid_cost(d: Tensor, truth: Tensor) -> Tensor:
    """−F̃(X, y*): over the classes, the summed distance to the class's best medoid."""
    same = truth[:, None] == truth
    cost = (d * same).sum(0)  # (B,): were this item the medoid of its class
    k = int(truth.max()) + 1
    best = torch.full((k,), torch.inf, dtype=d.dtype, device=d.device)
    return best.scatter_reduce(0, truth, cost, "amin").sum()


def _nmi(guesses: Tensor, truth: Tensor, k: int) -> Tensor:
    """NMI = 2I/(H + H) of each labelling (J, B) with the truth (B,), labels below k."""
    j, b = guesses.shape
    row = torch.arange(j, device=truth.device)[:, None] * k
    cell = (row + guesses) * k + truth  # (J, B)
    table = torch.bincount(cell.flatten(), minlength=j * k * k).view(j, k, k).double() / b
    h_guess, h_truth, h_both = (_entropy(t) for t in (table.sum(2), table.sum(1), table.flatten(1)))
    return 2 * (h_guess + h_truth - h_both) / (h_guess + h_truth)


def _entropy(shares: Tensor) -> Tensor:
    return -torch.xlogy(shares, shares).sum(1)


class StructuredClustering(InstanceLoss):
    """Structured clustering (Song et al. 2017); γ weighs the margin Δ = 1 − NMI.

    The sum over the batch is the paper's: the loss grows with the batch.
    """

    def __init__(self, *, gamma: float = 1.0, refinements: int = 5) -> None:
        super().__init__()
        self.gamma = gamma
        self.refinements = refinements

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return structured_clustering(x, labels, gamma=self.gamma, refinements=self.refinements)
