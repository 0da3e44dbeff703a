"""Proxy-NCA, Algorithm 1 of the paper, and its softmax form, Proxy-NCA++.

Proxy-NCA leaves the positive *out* of the denominator, as Eq. 4 is written, so it can go below
zero. Putting it in gives the softmax form, which most public code calls Proxy-NCA; here it has
the name of the paper that studied it.
"""

import math
from functools import partial
from typing import ClassVar, Unpack

from torch import Tensor

from nofuss.losses.checks import check_number
from nofuss.losses.chunked import Form
from nofuss.losses.chunked_forms import at_once_is_faster, nca, nca_at_once
from nofuss.losses.proxy_loss import ProxyLoss, ProxyOptions, proxy_logits
from nofuss.proxies.assignment import ProxyTriplets


def nca_of_logits(
    logits: Tensor,
    triplets: ProxyTriplets,
    *,
    include_positive: bool = False,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return log Σ_{z∈Z} exp(logit_z) − logit_y for each row of logits (T, P): (T,).

    label_smoothing: takes that fraction of the target from y and spreads it evenly over Z and y,
        as `torch.nn.functional.cross_entropy` does.
    """
    own = triplets.positive[:, None]  # (T, 1)
    own_logit = logits.gather(1, own).squeeze(1)
    counted = None
    if triplets.negative is not None:
        counted = triplets.negative.scatter(1, own, include_positive)
        others = logits.masked_fill(~counted, -math.inf)
    elif include_positive:
        others = logits
    else:
        others = logits.scatter(1, own, -math.inf)
    losses = others.logsumexp(1) - own_logit
    if label_smoothing == 0:
        return losses
    mean = logits.mean(1) if counted is None else (logits * counted).sum(1) / counted.sum(1)
    return losses + label_smoothing * (own_logit - mean)


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
    return nca_of_logits(logits, ProxyTriplets(labels), include_positive=include_positive).mean()


class ProxyNCA(ProxyLoss):
    """Proxy-NCA: −log( exp(−d(x,p(y))) / Σ_{p(z)∈p(Z)} exp(−d(x,p(z))) ), Eq. 4 over proxies.

    Example::

        >>> criterion = nofuss.ProxyNCA(num_classes=100, dim=64)
        >>> model = torch.nn.Linear(512, 64)
        >>> optimizer = torch.optim.Adam(
        ...     [
        ...         {"params": model.parameters(), "lr": 1e-4},
        ...         {"params": criterion.parameters(), "lr": 1e-2},  # proxies move faster
        ...     ]
        ... )
        >>> features, labels = torch.randn(32, 512), torch.randint(100, (32,))
        >>> criterion(model(features), labels).backward()
        >>> optimizer.step()

    scale: 2·N_x·N_p, the scale of the cosine; None leaves the norms free, as the paper trains.
        18 is N_x = N_p = 3, inside the 16–28 that reproductions found to train well. On the
        unit sphere itself (scale 2) distances lie in [0, 4]: too soft to fit many classes.
    """

    fuses_few: ClassVar[bool] = True
    own_scale: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 18.0,
        **options: Unpack[ProxyOptions],
    ) -> None:
        super().__init__(num_classes, dim, scale=scale, **options)

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return nca_of_logits(self._logits(x, p), triplets)

    def _form(self, batch: int) -> Form:
        return nca_form(self, batch, include_positive=False)


class ProxyNCAPlusPlus(ProxyLoss):
    """The softmax form with temperature T (Teh, DeVries, Taylor 2020, Proxy-NCA++).

    −log( exp(−d(x,p(y))/T) / Σ_{p∈{p(y)}∪p(Z)} exp(−d(x,p)/T) ), d = |x − p|² on the unit
    sphere: logits 2·cos/T. This is the loss only, without that paper's pooling and sampling.

    Example::

        >>> criterion = nofuss.ProxyNCAPlusPlus(num_classes=100, dim=64, temperature=0.1)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    temperature: T; 1/9 is norms of 3, scale 18 of `ProxyNCA`.
    label_smoothing: fraction of the target that is spread evenly over p(y) and p(Z), as in
        `torch.nn.CrossEntropyLoss`; above 0 it takes the plain form.
    """

    free_norms: ClassVar[bool] = False
    fuses_few: ClassVar[bool] = True
    own_scale: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        temperature: float = 1 / 9,
        label_smoothing: float = 0.0,
        **options: Unpack[ProxyOptions],
    ) -> None:
        check_number("temperature", temperature, positive=True)
        check_smoothing(label_smoothing)
        if label_smoothing:
            if options.get("fused") or options.get("sharded"):
                raise ValueError(
                    "label_smoothing has no fused and no sharded form; leave fused and sharded out"
                )
            options["fused"] = False
        super().__init__(num_classes, dim, scale=2 / temperature, **options)
        self.label_smoothing = label_smoothing

    @classmethod
    def of_scale(cls, scale: float) -> dict[str, float]:
        """Return the temperature that gives this scale."""
        return {"temperature": 2 / scale}

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return nca_of_logits(
            self._logits(x, p),
            triplets,
            include_positive=True,
            label_smoothing=self.label_smoothing,
        )

    def _form(self, batch: int) -> Form:
        return nca_form(self, batch, include_positive=True)


def nca_form(loss: ProxyLoss, batch: int, *, include_positive: bool) -> Form:
    """Return the form that is faster for a batch of this size."""
    if loss.shard is None and at_once_is_faster(batch, len(loss.proxies)):
        return partial(nca_at_once, include_positive=include_positive)
    assert loss.scale is not None
    return partial(nca, scale=loss.scale, include_positive=include_positive)


def check_smoothing(label_smoothing: float) -> None:
    """Refuse a label smoothing that is not a fraction of the target."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected from 0 up, below 1")
