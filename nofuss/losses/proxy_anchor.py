"""Proxy-Anchor (Kim, Kim, Cho, Kwak 2020), Eq. 4 there: every proxy is an anchor.

Later than the paper, and here for comparison.
"""

from typing import ClassVar

from torch import Tensor

from nofuss.losses.fast.fused import fused_proxy_anchor
from nofuss.losses.of_logits import anchor_of_cosines
from nofuss.losses.proxy_loss import ProxyLoss, proxy_logits
from nofuss.proxies.assignment import Assignment, ProxyTriplets


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
    and no reduction but the mean over proxies.

    Example::

        >>> criterion = nofuss.ProxyAnchor(num_classes=100, dim=64)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    num_classes: labels are 0 … num_classes − 1.
    dim: of the embeddings and the proxies.
    scale: their α, the scale of the cosines.
    margin: their δ.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static", "balanced", or an `Assignment` that is not dynamic.
    reduction: "mean", the only one.
    fused: one node in the graph instead of many; None fuses where it is faster, see `ProxyNCA`.
    seed: for the initial proxies and for which labels share one; None uses torch's global
        generator.
    proxies: initial proxies (num_proxies, dim), as in `ProxyNCA`; None draws random directions.
    sharded: distribute the proxies over processes, as in `ProxyNCA`.
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
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        reduction: str = "mean",
        fused: bool | None = None,
        seed: int | None = None,
        proxies: Tensor | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__(
            num_classes,
            dim,
            scale=scale,
            proxies_per_class=proxies_per_class,
            assignment=assignment,
            reduction=reduction,
            fused=fused,
            seed=seed,
            proxies=proxies,
            sharded=sharded,
        )
        self.margin = margin

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        scale = self.scale
        assert scale is not None
        return anchor_of_cosines(x @ p.T, triplets, scale=scale, margin=self.margin)

    def _fused_loss(
        self, embeddings: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
    ) -> Tensor:
        scale = self.scale
        assert scale is not None
        return fused_proxy_anchor(
            embeddings, positive, proxies, scale=scale, margin=self.margin, shard=self.shard
        )
