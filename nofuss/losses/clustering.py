"""Structured clustering by facility location (Song et al. 2017): a baseline of the paper.

A clustering of the batch is a set S of medoids. Its score is the facility location function
F(X, S) = −Σᵢ min_{j∈S} |xᵢ − xⱼ|; the score of the true clustering y* takes the best medoid
of every class. The loss asks the true clustering to beat every other by a margin that grows
with how different the other is, Δ = 1 − NMI:

    [ max_S { F(X, S) + γ Δ(g(S), y*) } − F̃(X, y*) ]₊

The inner maximum (loss-augmented inference) is searched greedily, one medoid at a time, then
refined by swapping the medoid of a cluster with another of its members, as in tf.contrib's
`cluster_loss`, the baseline of published results: a swap is scored by the distances within its
cluster, with the clusters as they were before the pass; the best is always taken, and the
objective may fall. The search runs without gradients; the two scores of its result have them.

γ, the margin multiplier, decays while training goes on: 0.94 is the paper's rate.
"""

import torch
from torch import Tensor

from nofuss.geometry import root, unit_squared_distances
from nofuss.losses.checks import check_number, zero_with_graph
from nofuss.losses.instance_loss import InstanceLoss


def structured_clustering(
    embeddings: Tensor, labels: Tensor, *, gamma: float = 1.0, refinements: int = 5
) -> Tensor:
    """[max_S {F(X,S) + γΔ(S,y*)} − F̃(X,y*)]₊ on unit directions, Eq. 5 of Song et al. 2017."""
    classes, truth = torch.unique(labels, return_inverse=True)
    if len(classes) < 2 or len(classes) == len(labels):
        return zero_with_graph(embeddings)
    itself = torch.eye(len(embeddings), dtype=torch.bool, device=embeddings.device)
    # A medoid is at distance 0 from itself; the root of a rounding error is not.
    d = root(unit_squared_distances(embeddings, embeddings)).masked_fill(itself, 0)  # (B, B)
    medoids = loss_augmented_medoids(d.detach(), truth, gamma=gamma, refinements=refinements)
    assigned = _assign(d.detach(), medoids[None])[:, 0]
    margin = gamma * (1 - _nmi(assigned[None], truth, len(classes)))[0]
    to_medoid = d[torch.arange(len(d), device=d.device), medoids[assigned]]
    return (margin.to(d.dtype) - to_medoid.sum() + _best_medoid_cost(d, truth)).clamp_min(0)


def loss_augmented_medoids(d: Tensor, truth: Tensor, *, gamma: float, refinements: int) -> Tensor:
    """Return rows of the medoids S, |S| = classes, searched to maximise F(X,S) + γΔ(S,y*)."""
    medoids = greedy_medoids(d, truth, gamma=gamma)
    for _ in range(refinements):
        assigned = _assign(d, medoids[None])[:, 0]
        for cluster in range(len(medoids)):
            members = (assigned == cluster).nonzero().squeeze(1)
            tries = medoids.repeat(len(members), 1)  # each member in the medoid's place
            tries[:, cluster] = members
            within = d[members][:, members].sum(0)
            unlike = 1 - _nmi(_assign(d, tries).T, truth, len(medoids))
            medoids = tries[(gamma * unlike - within).argmax()]
    return medoids


def greedy_medoids(d: Tensor, truth: Tensor, *, gamma: float) -> Tensor:
    """Add the medoid that raises F(X,S) + γΔ(S,y*) most, until there are as many as classes."""
    k = int(truth.max()) + 1
    items = torch.arange(len(d), device=d.device)
    medoids = items[:0]
    cost = torch.full_like(d[0], torch.inf)  # distance to the closest medoid so far
    assigned = torch.zeros_like(truth)
    for size in range(k):  # every item is tried as the next medoid, all at once
        closer = (d < cost) | (items[:, None] == items)  # (B candidates, B items)
        guess = torch.where(closer, size, assigned)
        guess[:, medoids] = torch.arange(size, device=d.device)  # a medoid is its own cluster
        score = gamma * (1 - _nmi(guess, truth, k)) - torch.minimum(d, cost).sum(1)
        score[medoids] = -torch.inf
        best = score.argmax()
        medoids = torch.cat([medoids, best[None]])
        cost, assigned = torch.minimum(d[best], cost), guess[best]
    return medoids


def _assign(d: Tensor, medoids: Tensor) -> Tensor:
    """Return the closest medoid of each item, (B, J) for medoids (J, K); a medoid is its own."""
    assigned = d[:, medoids].argmin(2)
    own = torch.arange(medoids.shape[1], device=d.device).expand_as(medoids)
    return assigned.scatter(0, medoids.T, own.T)


def _best_medoid_cost(d: Tensor, truth: Tensor) -> Tensor:
    """Return −F̃(X, y*): the sum over classes of distances to the class's best medoid."""
    same = truth[:, None] == truth
    cost = (d * same).sum(0)  # (B,): the cost of each item as the medoid of its class
    k = int(truth.max()) + 1
    best = torch.full((k,), torch.inf, dtype=d.dtype, device=d.device)
    return best.scatter_reduce(0, truth, cost, "amin").sum()


def _nmi(guesses: Tensor, truth: Tensor, k: int) -> Tensor:
    """Return NMI = 2I/(H + H) of each labelling (J, B) with the truth (B,), labels below k."""
    j, b = guesses.shape
    # One bincount fills all J contingency tables (k, k).
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

    gamma: γ at the start.
    gamma_decay: factor of γ from one epoch to the next, see `set_epoch`; the paper has 0.94.
    refinements: how many passes of swaps.
    """

    def __init__(
        self, *, gamma: float = 1.0, gamma_decay: float = 1.0, refinements: int = 5
    ) -> None:
        super().__init__()
        check_number("gamma", gamma)
        check_number("gamma_decay", gamma_decay, positive=True)
        check_number("refinements", refinements)
        self.gamma = gamma
        self.gamma_decay = gamma_decay
        self.refinements = refinements
        self.epoch = 0.0

    def set_epoch(self, epoch: float) -> None:
        """Set γ to gamma · gamma_decay^epoch; call it before each epoch (or step, in fractions).

        The epoch is no part of the state_dict: a resumed training sets it again.
        """
        check_number("epoch", epoch)
        self.epoch = epoch

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        gamma = self.gamma * self.gamma_decay**self.epoch
        return structured_clustering(x, labels, gamma=gamma, refinements=self.refinements)
