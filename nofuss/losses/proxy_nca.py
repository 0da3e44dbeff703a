"""Proxy-NCA, Algorithm 1 of the paper, and its softmax form, Proxy-NCA++.

Proxy-NCA leaves the positive *out* of the denominator, as Eq. 4 is written, so it can go below
zero. Putting it in gives the softmax form, which most public code calls Proxy-NCA; here it has
the name of the paper that studied it.
"""

from typing import ClassVar

from torch import Tensor

from nofuss.losses.fast.fused import fused_proxy_nca
from nofuss.losses.inputs import check_number
from nofuss.losses.of_logits import nca_of_logits
from nofuss.losses.proxy_loss import ProxyLoss, proxy_logits
from nofuss.proxies.assignment import Assignment, ProxyTriplets


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

    num_classes: labels are 0 … num_classes − 1.
    dim: of the embeddings and the proxies.
    scale: 2·N_x·N_p, the scale of the cosine; None leaves the norms free, as the paper trains.
        18 is N_x = N_p = 3, inside the 16–28 that reproductions found to train well. On the
        unit sphere itself (scale 2) distances lie in [0, 4]: too soft to fit many classes.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static", "dynamic", "balanced", or an `Assignment`. Without labels (bare triplets)
        use "dynamic", where num_classes × proxies_per_class is just the number of proxies; or
        "balanced" with the groups of `nofuss.linked_groups` as labels.
    reduction: "mean", "sum", or "none" for the loss of each embedding (B,).
    fused: compute the loss as one node of the graph instead of many, over chunks of proxies that
        stay in cache; values and gradients are those of the plain form. True and False mean
        always and never; None fuses where it is faster. Free norms, `reduction="none"` and a Z
        that is not every other proxy have the plain form only, which also serves second
        derivatives and torch.func.
    seed: for the initial proxies and for which labels share one; None uses torch's global
        generator.
    proxies: initial proxies (num_proxies, dim), copied as float32; None draws random directions.
        Row c is the proxy of label c; several proxies of a label are neighbouring rows.
    sharded: distribute the proxies over processes (`nofuss.distributed.processes.joined`): the
        parameter then holds the rows of this process only. Every process passes the same, whole
        batch (see `distributed/shard.py`), and all initial proxies if any; it gets the loss
        that one process with all proxies would get. For one proxy a label or fewer, and a scale.
    """

    fuses_few: ClassVar[bool] = True

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return nca_of_logits(self._logits(x, p), triplets)

    def _fused_loss(
        self, embeddings: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
    ) -> Tensor:
        scale = self.scale
        assert scale is not None
        return fused_proxy_nca(
            embeddings, positive, proxies, scale=scale, share=share, shard=self.shard
        )


class ProxyNCAPlusPlus(ProxyLoss):
    """The softmax form with temperature T (Teh, DeVries, Taylor 2020, Proxy-NCA++).

    −log( exp(−d(x,p(y))/T) / Σ_{p∈{p(y)}∪p(Z)} exp(−d(x,p)/T) ), d = |x − p|² on the unit
    sphere: logits 2·cos/T. This is the loss only, without that paper's pooling and sampling.

    Example::

        >>> criterion = nofuss.ProxyNCAPlusPlus(num_classes=100, dim=64, temperature=0.1)
        >>> embeddings, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> criterion(embeddings, labels).backward()

    num_classes: labels are 0 … num_classes − 1.
    dim: of the embeddings and the proxies.
    temperature: T; 1/9 is norms of 3, scale 18 of `ProxyNCA`.
    label_smoothing: share of the target that is spread evenly over p(y) and p(Z), as in
        `torch.nn.CrossEntropyLoss`; above 0 it takes the plain form.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static", "dynamic", "balanced" or an `Assignment`, as in `ProxyNCA`.
    reduction: "mean", "sum", or "none" for the loss of each embedding (B,).
    fused: one node in the graph instead of many; None fuses where it is faster, see `ProxyNCA`.
    seed: for the initial proxies and for which labels share one; None uses torch's global
        generator.
    proxies: initial proxies (num_proxies, dim), as in `ProxyNCA`; None draws random directions.
    sharded: distribute the proxies over processes, as in `ProxyNCA`.
    """

    free_norms: ClassVar[bool] = False
    fuses_few: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        temperature: float = 1 / 9,
        label_smoothing: float = 0.0,
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        reduction: str = "mean",
        fused: bool | None = None,
        seed: int | None = None,
        proxies: Tensor | None = None,
        sharded: bool = False,
    ) -> None:
        check_number("temperature", temperature, positive=True)
        check_smoothing(label_smoothing)
        if label_smoothing and (fused or sharded):
            raise ValueError(
                "label_smoothing has no fused and no sharded form; leave fused and sharded out"
            )
        super().__init__(
            num_classes,
            dim,
            scale=2 / temperature,
            proxies_per_class=proxies_per_class,
            assignment=assignment,
            reduction=reduction,
            fused=False if label_smoothing else fused,
            seed=seed,
            proxies=proxies,
            sharded=sharded,
        )
        self.label_smoothing = label_smoothing

    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        return nca_of_logits(
            self._logits(x, p),
            triplets,
            include_positive=True,
            label_smoothing=self.label_smoothing,
        )

    def _fused_loss(
        self, embeddings: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
    ) -> Tensor:
        scale = self.scale
        assert scale is not None
        return fused_proxy_nca(
            embeddings,
            positive,
            proxies,
            scale=scale,
            include_positive=True,
            share=share,
            shard=self.shard,
        )


def check_smoothing(label_smoothing: float) -> None:
    """Refuse a label smoothing that is not a share of the target."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected from 0 up, below 1")
