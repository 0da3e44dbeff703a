"""Proxy-Triplet: the margin triplet loss, Eq. 3, over proxies."""

from functools import partial
from typing import Unpack

from torch import Tensor

from nofuss.losses import chunked_forms
from nofuss.losses.checks import check_number
from nofuss.losses.chunked import Form
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.proxies.assignment import ProxyTriplets


def triplet_of_logits(logits: Tensor, triplets: ProxyTriplets, *, margin: float) -> Tensor:
    """Return the mean over z∈Z of [logit_z + M − logit_y]₊ for each row, (T,); logits are −d."""
    own = triplets.positive[:, None]  # (T, 1)
    hinge = (logits + margin - logits.gather(1, own)).clamp_min(0)  # (T, P)
    if triplets.negative is None:
        return hinge.scatter(1, own, 0).sum(1) / (hinge.shape[1] - 1)
    return (hinge * triplets.negative).sum(1) / triplets.negative.sum(1)


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

    scale: 2 is the unit sphere, N_x = N_p = 1, d in [0, 4]; a larger one only shrinks the
        margin, since the hinge is linear. None leaves the norms free.
    margin: M, from 0 up.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 2.0,
        margin: float = 0.1,
        **options: Unpack[ProxyOptions],
    ) -> None:
        check_number("margin", margin)
        super().__init__(num_classes, dim, scale=scale, **options)
        self.margin = margin

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return triplet_of_logits(self._logits(x, p), triplets, margin=self.margin)

    def _form(self, batch: int) -> Form:
        return partial(chunked_forms.triplet, margin=self.margin)
