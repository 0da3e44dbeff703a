"""Proxy-Triplet: the margin triplet loss, Eq. 3, over proxies."""

from typing import ClassVar

from torch import Tensor

from nofuss.losses.fast.fused import fused_proxy_triplet
from nofuss.losses.of_logits import triplet_of_logits
from nofuss.losses.proxy_loss import ProxyLoss, proxy_logits
from nofuss.proxies.assignment import Assignment, ProxyTriplets


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
    return triplet_of_logits(logits, ProxyTriplets(labels), margin=margin).mean()


class ProxyTriplet(ProxyLoss):
    """Proxy-Triplet: [d(x,p(y)) + M − d(x,p(z))]₊, Eq. 3 over proxies, mean over all p(z).

    The loss of a triplet (x, p(y), p(Z)) is a mean over its p(Z), however many they are.

    Example::

        >>> criterion = nofuss.ProxyTriplet(num_classes=100, dim=64, margin=0.2)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    num_classes: labels are 0 … num_classes − 1.
    dim: of the embeddings and the proxies.
    scale: 2 is the unit sphere, N_x = N_p = 1, d in [0, 4]; a larger one only shrinks the
        margin, since the hinge is linear. None leaves the norms free.
    margin: M.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static", "dynamic", "balanced" or an `Assignment`, as in `ProxyNCA`.
    reduction: "mean", "sum", or "none" for the loss of each embedding (B,).
    fused: one node in the graph instead of many; None fuses where it is faster, see `ProxyNCA`.
    seed: for the initial proxies and for which labels share one; None uses torch's global
        generator.
    proxies: initial proxies (num_proxies, dim), as in `ProxyNCA`; None draws random directions.
    sharded: distribute the proxies over processes, as in `ProxyNCA`.
    """

    needs_scale: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 2.0,
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
        return triplet_of_logits(self._logits(x, p), triplets, margin=self.margin)

    def _fused_loss(
        self, embeddings: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
    ) -> Tensor:
        scale = self.scale
        assert scale is not None
        return fused_proxy_triplet(
            embeddings,
            positive,
            proxies,
            scale=scale,
            margin=self.margin,
            share=share,
            shard=self.shard,
        )
