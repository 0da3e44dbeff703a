"""Proxy-Anchor (Kim, Kim, Cho, Kwak 2020), Eq. 4 there: every proxy is an anchor.

Later than the paper, and here for comparison.
"""

import math
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from nofuss.losses import chunked_forms
from nofuss.losses.checks import check_number
from nofuss.losses.chunked import Form
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.proxies.assignment import ProxyTriplets


def anchor_of_cosines(
    cosines: Tensor, triplets: ProxyTriplets, *, scale: float, margin: float
) -> Tensor:
    """Return Proxy-Anchor of cosines (B, P), a scalar; P⁺ are the proxies with a positive."""
    columns = torch.arange(cosines.shape[1], device=cosines.device)
    positive = triplets.positive[:, None] == columns  # (B, P)
    negative = ~positive if triplets.negative is None else triplets.negative
    pull = _log1p_sum_exp(-scale * (cosines - margin), positive)  # (P,)
    push = _log1p_sum_exp(scale * (cosines + margin), negative)
    return pull.sum() / positive.any(0).sum() + push.mean()


def _log1p_sum_exp(logits: Tensor, counted: Tensor) -> Tensor:
    """Return log(1 + Σ exp) of each column over the counted rows; log 1 = 0 without any."""
    one = torch.zeros_like(logits[:1])
    return torch.cat([one, logits.masked_fill(~counted, -math.inf)]).logsumexp(0)


def proxy_anchor(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, *, scale: float = 32.0, margin: float = 0.1
) -> Tensor:
    """mean_{p∈P⁺} log(1+Σ_{x∈X⁺} e^{−α(s−δ)}) + mean_{p∈P} log(1+Σ_{x∈X⁻} e^{α(s+δ)})."""
    cosines = proxy_logits(embeddings, proxies, 1.0)  # (B, P)
    return anchor_of_cosines(cosines, ProxyTriplets(labels), scale=scale, margin=margin)


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor (Kim et al. 2020); scale is their α, margin their δ.

    A proxy must stand for the same labels all the time, so dynamic assignment is refused. The
    batch is summed inside a logarithm, so a single embedding has no loss: there are no weights,
    no reduction but the mean over proxies, and several processes must each have the whole batch.

    Example::

        >>> criterion = nofuss.ProxyAnchor(num_classes=100, dim=64)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    scale: their α, the scale of the cosines.
    margin: their δ, from 0 up.
    """

    takes: ClassVar[tuple[str, ...]] = ("static", "fractional", "several", "balanced")
    free_norms: ClassVar[bool] = False
    separable: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        **options: Unpack[ProxyOptions],
    ) -> None:
        check_number("margin", margin)
        super().__init__(num_classes, dim, scale=scale, **options)
        self.margin = margin

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        assert self.scale is not None
        return anchor_of_cosines(x @ p.T, triplets, scale=self.scale, margin=self.margin)

    def _form(self, batch: int) -> Form:
        assert self.scale is not None
        return partial(chunked_forms.anchor, margin=self.scale * self.margin)
