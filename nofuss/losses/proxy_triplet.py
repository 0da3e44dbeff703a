"""Proxy-Triplet: the margin triplet loss, Eq. 3, over proxies."""

from typing import ClassVar, Unpack

from torch import Tensor

from nofuss.geometry import normalize
from nofuss.losses.fused_margin import fused_proxy_triplet
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.losses.sharded import sharded_triplet
from nofuss.proxies.assignment import ProxyTriplets


def proxy_triplet(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    *,
    margin: float = 0.1,
    scale: float | None = 2.0,
) -> Tensor:
    """Eq. 3 over proxies, static assignment: mean of [d(x,p(y)) + M − d(x,p(z))]₊."""
    logits = proxy_logits(embeddings, proxies, scale)  # (B, P)
    return triplet_of_logits(logits, ProxyTriplets(labels), margin=margin)


def triplet_of_logits(logits: Tensor, triplets: ProxyTriplets, *, margin: float) -> Tensor:
    """Mean of [logit_z + M − logit_y]₊ over all (x, p(y), p(z)); logits are −d."""
    own = triplets.positive[:, None]  # (T, 1)
    hinge = (logits + margin - logits.gather(1, own)).clamp_min(0)  # (T, P)
    if triplets.negative is None:
        return hinge.scatter(1, own, 0).sum() / (hinge.numel() - len(hinge))
    return (hinge * triplets.negative).sum() / triplets.negative.sum()


class ProxyTriplet(ProxyLoss):
    """Proxy-Triplet: [d(x,p(y)) + M − d(x,p(z))]₊, Eq. 3 over proxies, mean over all p(z).

    scale: 2 is the unit sphere, N_x = N_p = 1, d in [0, 4]; a larger one only shrinks the
        margin, since the hinge is linear.
    """

    needs_scale: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 2.0,
        margin: float = 0.1,
        **options: Unpack[ProxyOptions],
    ) -> None:
        super().__init__(num_classes, dim, scale=scale, **options)
        self.margin = margin

    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        logits = self._logits(x, p)
        if self.shard is not None:
            return sharded_triplet(logits, triplets, self.shard, margin=self.margin)
        return triplet_of_logits(logits, triplets, margin=self.margin)

    def _fused_loss(self, embeddings: Tensor, positive: Tensor, proxies: Tensor) -> Tensor:
        scale = self.scale
        assert scale is not None
        x = normalize(embeddings)
        return fused_proxy_triplet(
            x, positive, proxies, scale=scale, margin=self.margin, shard=self.shard
        )
