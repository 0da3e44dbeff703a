"""Proxy-Anchor (Kim, Kim, Cho, Kwak 2020), Eq. 4 there: every proxy is an anchor.

Later than the paper, and here for comparison.
"""

from typing import ClassVar, Unpack

import torch
from torch import Tensor

from nofuss.geometry import normalize
from nofuss.losses.fused_margin import fused_proxy_anchor
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.losses.sharded import log1p_sum_exp, sharded_anchor
from nofuss.proxies.assignment import ProxyTriplets


def proxy_anchor(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, *, scale: float = 32.0, margin: float = 0.1
) -> Tensor:
    """mean_{p∈P⁺} log(1+Σ_{x∈X⁺} e^{−α(s−δ)}) + mean_{p∈P} log(1+Σ_{x∈X⁻} e^{α(s+δ)})."""
    cosines = proxy_logits(embeddings, proxies, 1.0)  # (B, P)
    return anchor_of_cosines(cosines, ProxyTriplets(labels), scale=scale, margin=margin)


def anchor_of_cosines(
    cosines: Tensor, triplets: ProxyTriplets, *, scale: float | Tensor, margin: float
) -> Tensor:
    """Proxy-Anchor of cosines (B, P); P⁺ are the proxies with a positive in the batch."""
    positive = torch.zeros_like(cosines, dtype=torch.bool)
    positive.scatter_(1, triplets.positive[:, None], True)
    negative = ~positive if triplets.negative is None else triplets.negative
    pull = log1p_sum_exp(-scale * (cosines - margin), positive)  # (P,)
    push = log1p_sum_exp(scale * (cosines + margin), negative)
    return pull.sum() / positive.any(0).sum() + push.mean()


class ProxyAnchor(ProxyLoss):
    """Proxy-Anchor (Kim et al. 2020); scale is their α, margin their δ.

    A proxy must stand for the same labels all the time, so dynamic assignment is refused.
    """

    takes: ClassVar[tuple[str, ...]] = ("static", "fractional", "several")

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        **options: Unpack[ProxyOptions],
    ) -> None:
        if scale is None:
            raise ValueError("scale is None; ProxyAnchor is made of cosines, so it needs a number")
        super().__init__(num_classes, dim, scale=scale, **options)
        self.margin = margin

    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        assert self.scale is not None
        cosines = x @ p.T
        if self.shard is not None:
            return sharded_anchor(
                cosines, triplets, self.shard, scale=self.scale, margin=self.margin
            )
        return anchor_of_cosines(cosines, triplets, scale=self.scale, margin=self.margin)

    def _fused_loss(self, embeddings: Tensor, positive: Tensor, proxies: Tensor) -> Tensor:
        scale = self.scale
        assert scale is not None
        x = normalize(embeddings)
        return fused_proxy_anchor(
            x, positive, proxies, scale=scale, margin=self.margin, shard=self.shard
        )
