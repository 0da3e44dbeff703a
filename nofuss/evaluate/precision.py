"""MAP@R and R-precision (Musgrave et al. 2020), from the ranks of all positives.

R is the number of items of the query's class, itself left out. With the positives in order of
distance and m(r) the items of other classes at least as close as the r-th, its rank is r + m(r):

    R-precision = #{r : r + m(r) ≤ R} / R        MAP@R = Σ {r / (r + m(r)) : r + m(r) ≤ R} / R

so only the m(r) are counted, strip by strip of queries. A wrong item matters only while it is
closer than a positive whose rank can still be within R; the others cost one comparison.
"""

from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.evaluate.retrieval import BLOCK, Retrieval, blocks, retrieval
from nofuss.geometry import Array
from nofuss.processes import all_sum, rank, world


class Precisions(NamedTuple):
    """Scores of each query, (N,), in the caller's order; NaN for what is no query."""

    map_at_r: Tensor
    r_precision: Tensor


def map_at_r(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
) -> float:
    """Mean over the queries of the average precision within the R nearest."""
    return float(
        precisions_at_r(
            embeddings,
            labels,
            gallery=gallery,
            gallery_labels=gallery_labels,
            normalize=normalize,
        ).map_at_r.nanmean()
    )


def r_precision(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
) -> float:
    """Mean over the queries of the share of their class among the R nearest."""
    return float(
        precisions_at_r(
            embeddings,
            labels,
            gallery=gallery,
            gallery_labels=gallery_labels,
            normalize=normalize,
        ).r_precision.nanmean()
    )


def precisions_at_r(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    normalize: bool = True,
    block: int = BLOCK,
) -> Precisions:
    """MAP@R and R-precision of every query; queries, gallery and ties as in `recall_at_k`."""
    task = retrieval(
        embeddings,
        labels,
        gallery=gallery,
        gallery_labels=gallery_labels,
        normalize=normalize,
    )
    n = len(task.left)
    scores = torch.zeros((2, n), dtype=torch.float64, device=task.left.device)
    average, found = scores
    for rows in islice(blocks(0, n, block), rank(), None, world()):
        wrong = _wrong_before(task, rows, block)  # (b, R) m(r)
        r = torch.arange(1, wrong.shape[1] + 1, device=wrong.device)
        total = task.positives[rows, None]  # R; 0 / 0 makes what is no query NaN
        hit = (r + wrong <= total) & (r <= total)
        average[rows] = (r / (r + wrong).double()).mul_(hit).sum(1) / total[:, 0]
        found[rows] = hit.sum(1).double() / total[:, 0]
    all_sum(scores)
    return Precisions(task.back(average), task.back(found))


def _wrong_before(task: Retrieval, rows: slice, block: int) -> Tensor:
    """m(r) of a strip of queries, (b, R); exact wherever r + m(r) ≤ R."""
    positives = _sorted_positives(task, rows)  # (b, R) falling, −inf past a query's last
    reach = positives - task.tie_width(positives, rows)
    last = (task.positives[rows, None] - 1).clamp_min(0)  # a query's R may be below the strip's
    nearest = torch.full_like(reach, -torch.inf)  # (b, R) the R nearest wrong items, falling
    # The similarity from which a wrong item can matter; none does to what is no query.
    floor = reach.gather(1, last)[:, 0].masked_fill_(task.positives[rows] == 0, torch.inf)
    r, span = reach.shape[1], task.gallery_span(rows)
    for cols in blocks(0, len(task.right), max(block, r)):
        s = task.left[rows] @ task.right[cols].T
        if cols.start < span.stop and span.start < cols.stop:
            task.hide_positives(s, rows, cols)
        some = (s.amax(1) >= floor).nonzero()[:, 0]
        merged = torch.cat([nearest[some], s[some]], 1).topk(r).values
        nearest[some] = merged
        # Past R wrong items nearer than a positive, that positive no longer counts.
        worst = merged.gather(1, last[some])[:, 0]
        done = worst >= reach[some, 0]
        floor[some] = torch.where(done, torch.inf, torch.maximum(floor[some], worst))
    return torch.searchsorted(-nearest, -reach, right=True)


def _sorted_positives(task: Retrieval, rows: slice) -> Tensor:
    """Similarities of a strip's queries to the items of their class, falling, (b, R)."""
    cols = task.gallery_span(rows)
    s = task.left[rows] @ task.right[cols].T
    task.hide_others(s, rows, cols)
    return s.topk(max(1, int(task.positives[rows].max()))).values
