"""Proxy-NCA over a sampled share of the negatives: a cheaper step that changes the objective.

Every proxy is a negative of every anchor, so a step over all of them touches all of them. A
sample touches its own rows only: loss, gradient and (sparse) update shrink with the share.

What it costs: the sum over a share q of the negatives is about q times the whole sum, so the
loss reads about log(1/q) too low. That is a constant, which leaves gradients alone, and
`corrected=True` adds it back. What remains is small and not corrected: log of a noisy sum is
below the log of its mean (by half its relative variance), and the batch's own proxies, always
in, are seen more often than others. In expectation each proxy's gradient is the full one; a
single step moves the sampled ones by 1/q of it.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nofuss.losses.fused import fused_proxy_nca


def sample_negatives(
    num_proxies: int, positive: Tensor, *, share: float, generator: torch.Generator | None = None
) -> Tensor:
    """Rows of a random share of the proxies, sorted, with all positives and two rows at least.

    Each row is drawn by itself with probability `share`; the generator must live on the
    positives' device.
    """
    if num_proxies < 2 or not 0 < share <= 1:
        raise ValueError(
            f"got num_proxies={num_proxies}, share={share}; expected two proxies or more and a "
            "share in (0, 1]"
        )
    device = positive.device
    taken = torch.rand(num_proxies, generator=generator, device=device) < share
    taken[positive] = True
    rows = taken.nonzero().squeeze(1)
    if len(rows) > 1:
        return rows
    step = torch.randint(1, num_proxies, (1,), generator=generator, device=device)
    return torch.cat([rows, (rows + step) % num_proxies]).sort().values


def sampled_proxy_nca(
    x: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    share: float,
    generator: torch.Generator | None = None,
    corrected: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Proxy-NCA with a sampled share of the proxies as negatives; see this file's head.

    corrected: add log((P − 1) / (sampled − 1)), so that the loss estimates the full one.
    sparse: give the proxies a sparse gradient, for SGD, Adagrad or SparseAdam; a dense one is
        as large as the proxies and lets every optimizer pass over all of them.
    """
    rows = sample_negatives(len(proxies), positive, share=share, generator=generator)
    subset = F.embedding(rows, proxies, sparse=sparse)
    loss = fused_proxy_nca(x, torch.searchsorted(rows, positive), subset, scale=scale)
    return loss + math.log((len(proxies) - 1) / (len(rows) - 1)) if corrected else loss
