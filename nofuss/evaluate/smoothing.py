"""Ranking that uses the neighbourhood: smoothed items and an expanded query (α-QE).

Each item of a query's vicinity becomes the mean of itself and its nearest there, weighted by
cosine^power (database augmentation, Arandjelović & Zisserman 2012; α-query expansion, Radenović et
al. 2018), and so does the query; the order is that of the means. A query is no item's neighbour: it
is searched from outside. Everything is a function of cosines, so that no vector is computed.

Labels are not used: what lies together with what is near is ranked higher.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.vicinity import Vicinity


class Weighting(NamedTuple):
    """How many neighbours are averaged, and the power of their cosine that weighs them."""

    neighbours: int
    power: float


@torch.no_grad()
def reranked(around: Vicinity, weighting: Weighting) -> Tensor:
    """Return the cosine of each item's mean with the query's, (Q, M); −inf where no item is."""
    k, power = weighting
    near, gram, exists = around.near, around.gram, around.exists
    k = min(k, near.shape[1])
    own = torch.diag_embed(exists.float())
    others = gram.masked_fill(own.bool() | ~exists[:, None], -torch.inf)
    weights = own + _weights(others, min(k, max(1, near.shape[1] - 1)), power)  # (Q, M, M)
    query_weights = _weights(near.masked_fill(~exists, -torch.inf)[:, None], k, power)[:, 0]
    # Means are m = Σ w x, so that cosines of means follow from the cosines of items.
    product = weights @ gram  # mᵢ·xⱼ
    lengths = (product * weights).sum(2).clamp_min(1e-12).sqrt()
    to_query = torch.einsum("qij,qj->qi", weights, near)  # mᵢ·q
    to_query += torch.einsum("qij,qj->qi", product, query_weights)
    scale = 1 + 2 * (query_weights * near).sum(1)  # |q + Σ w x|²
    scale += torch.einsum("qi,qij,qj->q", query_weights, gram, query_weights)
    cosine = to_query / lengths / scale.clamp_min(1e-12).sqrt()[:, None]
    return cosine.masked_fill(~exists, -torch.inf)


def _weights(cosines: Tensor, k: int, power: float) -> Tensor:
    """Return cosine^power of each row's k largest, 0 for the others and where it is negative."""
    best, places = cosines.topk(k, dim=2)
    return torch.zeros_like(cosines).scatter_(2, places, best.clamp_min(0) ** power)
