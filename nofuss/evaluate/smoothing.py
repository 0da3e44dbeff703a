"""Ranking that uses the neighbourhood: smoothed items and an expanded query (α-QE).

Each item of a query's vicinity becomes the mean of itself and its nearest there, weighted by
cosine^power (database augmentation, Arandjelović & Zisserman 2012; α-query expansion, Radenović et
al. 2018), and so does the query; the order is that of the means. A query is no item's neighbour: it
is searched from outside. Everything is a function of cosines, so that no vector is computed.

Labels are not used: what lies together with what is near is ranked higher.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.vicinity import Vicinity
from nofuss.geometry import Array


class Weighting(NamedTuple):
    """How many neighbours are averaged, and the power of their cosine that weighs them."""

    neighbours: int
    power: float


def fitting(weighting: Weighting | None, sizes: Array) -> Weighting | None:
    """Return the weighting with no more neighbours than a typical item has relatives.

    sizes: (C,) items of each class in the gallery. More neighbours would average what has nothing
    in common; with one item a class, ranking is by distance.
    """
    items = np.asarray(sizes)
    if weighting is None or not len(items):
        return weighting
    relatives = int(np.median(np.repeat(items, items))) - 1
    neighbours = min(weighting.neighbours, relatives)
    return weighting._replace(neighbours=neighbours) if neighbours > 0 else None


class _Neighbours(NamedTuple):
    place: Tensor  # in the vicinity
    weight: Tensor


@torch.no_grad()
def reranked(around: Vicinity, weighting: Weighting) -> Tensor:
    """Return the cosine of each item's mean with the query's, (Q, M); −inf where no item is."""
    return reranked_by(around, [weighting])[0]


@torch.no_grad()
def reranked_by(around: Vicinity, weightings: Sequence[Weighting]) -> list[Tensor]:
    """Return `reranked` of each weighting; neighbours are searched for once."""
    if not weightings:
        return []
    exists = around.exists
    most = min(max(weighting.neighbours for weighting in weightings), exists.shape[1])
    of_query = around.near.masked_fill(~exists, -torch.inf).topk(most)
    cosines = around.gram.masked_fill(~exists[:, None], -torch.inf)
    cosines.diagonal(dim1=1, dim2=2).fill_(-torch.inf)  # no item is its own neighbour
    of_items = cosines.topk(most)  # (Q, M, most)
    return [
        _reranked(around, _weighed(*of_query, weighting), _weighed(*of_items, weighting))
        for weighting in weightings
    ]


def _reranked(around: Vicinity, of_query: _Neighbours, of_items: _Neighbours) -> Tensor:
    near, gram, size = around.near, around.gram, around.near.shape[1]
    query_weights = torch.zeros_like(near).scatter_(1, *of_query)
    # Means are m = Σ w x, each item in its own with weight 1; their products follow from cosines.
    itself = torch.arange(size).expand(len(near), size)[..., None]
    place = torch.cat([itself, of_items.place], 2)
    weight = torch.cat([torch.ones_like(of_items.weight[..., :1]), of_items.weight], 2)
    with_query = near + (gram @ query_weights[..., None])[..., 0]  # x·(q + Σ w x)
    product = (weight * _pick(with_query, place)).sum(2)
    pairs = place[..., :, None] * size + place[..., None, :]  # (Q, M, k + 1, k + 1)
    among = _pick(gram.flatten(1), pairs)
    lengths = torch.einsum("qmab,qma,qmb->qm", among, weight, weight)
    scale = 1 + (query_weights * (near + with_query)).sum(1, keepdim=True)  # |q + Σ w x|²
    cosine = product / (lengths * scale).clamp_min(1e-12).sqrt()
    return cosine.masked_fill(~around.exists, -torch.inf)


def _weighed(cosines: Tensor, places: Tensor, weighting: Weighting) -> _Neighbours:
    """Return the first neighbours of a descending order; weight 0 where a cosine is negative."""
    k = weighting.neighbours
    return _Neighbours(places[..., :k], cosines[..., :k].clamp_min(0) ** weighting.power)


def _pick(values: Tensor, places: Tensor) -> Tensor:
    """Return values (Q, n) at places (Q, …)."""
    return values.gather(1, places.flatten(1)).view(places.shape)
