"""Proxy-NCA, Algorithm 1 of the paper, and its softmax form, Proxy-NCA++.

Proxy-NCA leaves the positive *out* of the denominator, as Eq. 4 is written, so it can go below
zero. Putting it in gives the softmax form, which most public code calls Proxy-NCA; here it has
the name of the paper that studied it.
"""

import math
from typing import ClassVar, Unpack

from torch import Tensor

from nofuss.geometry import normalize
from nofuss.losses.fused import fused_proxy_nca
from nofuss.losses.fused_sampling import sampled_proxy_nca
from nofuss.losses.fused_small import few, small_proxy_nca
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.losses.sharded import sharded_nca
from nofuss.proxies.assignment import ProxyTriplets
from nofuss.proxies.shard import Shard


def proxy_nca(
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    *,
    scale: float | None = 18.0,
    include_positive: bool = False,
) -> Tensor:
    """Eq. 4 over proxies, static assignment: the denominator sums negative proxies only.

    `include_positive=True` is the softmax form common elsewhere.
    """
    logits = proxy_logits(embeddings, proxies, scale)  # (B, P)
    return nca_of_logits(logits, ProxyTriplets(labels), include_positive=include_positive)


def nca_of_logits(
    logits: Tensor,
    triplets: ProxyTriplets,
    *,
    include_positive: bool = False,
    shard: Shard | None = None,
) -> Tensor:
    """Mean of log Σ_{z∈Z} exp(logit_z) − logit_y over rows of logits (T, P)."""
    if shard is not None:
        return sharded_nca(logits, triplets, shard, include_positive=include_positive)
    own = triplets.positive[:, None]  # (T, 1)
    if triplets.negative is not None:
        counted = triplets.negative.scatter(1, own, include_positive)
        others = logits.masked_fill(~counted, -math.inf)
    elif include_positive:
        others = logits
    else:
        others = logits.scatter(1, own, -math.inf)
    return (others.logsumexp(1) - logits.gather(1, own).squeeze(1)).mean()


class ProxyNCA(ProxyLoss):
    """Proxy-NCA: −log( exp(−d(x,p(y))) / Σ_{p(z)∈p(Z)} exp(−d(x,p(z))) ), Eq. 4 over proxies.

    scale: 18 is N_x = N_p = 3, inside the 16–28 that reproductions found to train well. On the
        unit sphere itself (scale 2) distances lie in [0, 4]: too soft to fit many classes.
    learn_scale: without the positive in the denominator a well-separated batch always gains
        from a larger scale, so a learned one keeps growing; give it a small rate.
    negative_share: below 1, each training step takes that share of the proxies, drawn from
        torch's global generator, and all positives; it changes the objective, see
        `fused_sampling.py` for the bias.
    """

    fuses_few: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 18.0,
        negative_share: float = 1.0,
        **options: Unpack[ProxyOptions],
    ) -> None:
        super().__init__(num_classes, dim, scale=scale, **options)
        if not 0 < negative_share <= 1:
            raise ValueError(f"negative_share is {negative_share}; expected above 0, at most 1")
        if negative_share < 1:
            if self.fused is False:
                raise ValueError("negative_share below 1 needs the fused form; drop one of them")
            if self.shard is not None:
                raise ValueError("negative_share below 1 needs all proxies here; drop one of them")
            self.fused = True
        self.negative_share = negative_share

    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return nca_of_logits(self._logits(x, p), triplets, shard=self.shard)

    def _fused_loss(self, embeddings: Tensor, positive: Tensor, proxies: Tensor) -> Tensor:
        scale = self.scale
        assert scale is not None
        if self.negative_share < 1 and self.training:
            x = normalize(embeddings)
            return sampled_proxy_nca(x, positive, proxies, scale=scale, share=self.negative_share)
        return _one_function(embeddings, positive, proxies, scale=scale, shard=self.shard)


class ProxyNCAPlusPlus(ProxyLoss):
    """The softmax form with temperature T (Teh, DeVries, Taylor 2020, Proxy-NCA++).

    −log( exp(−d(x,p(y))/T) / Σ_{p∈{p(y)}∪p(Z)} exp(−d(x,p)/T) ), d = |x − p|² on the unit
    sphere: logits 2·cos/T. The loss only; the pooling and sampling of that paper are elsewhere.
    """

    fuses_few: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        temperature: float = 1 / 9,
        **options: Unpack[ProxyOptions],
    ) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}; expected above 0")
        super().__init__(num_classes, dim, scale=2 / temperature, **options)

    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        logits = self._logits(x, p)
        return nca_of_logits(logits, triplets, include_positive=True, shard=self.shard)

    def _fused_loss(self, embeddings: Tensor, positive: Tensor, proxies: Tensor) -> Tensor:
        scale = self.scale
        assert scale is not None
        return _one_function(
            embeddings,
            positive,
            proxies,
            scale=scale,
            include_positive=True,
            shard=self.shard,
        )


def _one_function(
    embeddings: Tensor,
    positive: Tensor,
    proxies: Tensor,
    *,
    scale: float | Tensor,
    include_positive: bool = False,
    shard: Shard | None = None,
) -> Tensor:
    """The fused form for many proxies or for few."""
    if shard is not None or not few(len(embeddings), len(proxies)):
        return fused_proxy_nca(
            normalize(embeddings),
            positive,
            proxies,
            scale=scale,
            include_positive=include_positive,
            shard=shard,
        )
    return small_proxy_nca(
        embeddings, positive, proxies, scale=scale, include_positive=include_positive
    )
