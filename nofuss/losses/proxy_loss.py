"""The shell of every loss over proxies: proxies, assignment, norms, one calling convention.

Norms. The paper trains with free norms and analyses equal ones: |x| = N_x, |p| = N_p. With
equal norms −d(x,p) = 2·N_x·N_p·cos(x,p) − N_x² − N_p², and the constants cancel in every loss
here. So the two norms are one number, `scale` = 2·N_x·N_p, times the cosine of two directions.
`scale=None` leaves the norms free: d(x,p) = |x − p|² of the vectors as they are.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from nofuss.distributed.processes import rows_of_all, together
from nofuss.distributed.shard import Shard, copy_proxies, first_proxies, own_shard
from nofuss.geometry import Array, normalize, squared_distances
from nofuss.losses.checks import (
    check_embeddings,
    check_labels,
    check_triplets,
    check_weights,
    full_precision,
    one_or_nan,
    without_autocast,
    zero_with_graph,
)
from nofuss.losses.chunked import Chunked, Form, Workspace, can_sum, pays
from nofuss.proxies.assignment import (
    NAMES,
    Assignment,
    Dynamic,
    ProxyTriplets,
    build_assignment,
    count_proxies,
    kind_of,
)

REDUCTIONS = ("mean", "sum", "none")
NOT_SEPARABLE = "it sums over the batch inside a logarithm, so a single embedding has no loss"

OPTIONS = """
    num_classes: labels are 0 … num_classes − 1.
    dim: of the embeddings and the proxies.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static" (the default), "dynamic", "matched" (a dynamic one that does not collapse),
        "balanced", or an `Assignment`. Without labels (bare triplets) use "dynamic", where
        num_classes × proxies_per_class is just the number of proxies; or "balanced" with the groups
        of `nofuss.linked_groups` as labels.
    reduction: "mean" (the default), "sum", or "none" for the loss of each embedding (B,).
    fused: compute loss and gradients together, as one node of the graph, over chunks of proxies
        that stay in cache. True and False mean always and never; None (the default) where it is
        faster. Free norms, `reduction="none"` and a Z that is not every other proxy have the plain
        form only, which also serves second derivatives, torch.func and torch.compile.
    seed: for the initial proxies and for which labels share one; None uses torch's global
        generator.
    proxies: initial proxies (num_proxies, dim), copied as float32; None draws random directions.
        Row c is the proxy of label c; several proxies of a label are neighbouring rows.
    sharded: distribute the proxies over processes (`nofuss.distributed.processes.joined`): the
        parameter then holds the rows of this process only. Every process passes the same, whole
        batch (see `distributed/shard.py`), and all initial proxies if any; it gets the loss
        that one process with all proxies would get. For one proxy a label or fewer, and a scale.
    """
"""Describes the keywords of `ProxyOptions` and the two arguments before them; part of the
docstring of every loss over proxies."""


class ProxyOptions(TypedDict, total=False):
    """The keywords that all losses over proxies share."""

    proxies_per_class: float
    assignment: str | Assignment
    reduction: str
    fused: bool | None
    seed: int | None
    proxies: Tensor | None
    sharded: bool


def proxy_logits(x: Tensor, p: Tensor, scale: float | None) -> Tensor:
    """Return −d(x, p) up to a constant, (B, D) × (P, D) → (B, P): scale·cos, or −|x − p|²."""
    x, p = full_precision(x, p), full_precision(p, x)
    if scale is None:
        return -squared_distances(x, p)
    return scale * (normalize(x) @ normalize(p).T)


class ProxyLoss(nn.Module, ABC):
    """`criterion(embeddings, labels)`, or `criterion(anchors, positives=…, negatives=…)`.

    `proxies` is one parameter (num_proxies, dim), float32 whatever the input's precision; give it
    to the optimizer with a separate rate, often 100 times that of the backbone.
    """

    takes: ClassVar[tuple[str, ...]] = (
        *("static", "sampled", "fractional", "several", "dynamic", "matched", "balanced"),
    )
    fusible: ClassVar[bool] = False
    """Whether there is a chunked form: a subclass that has `_form` has one."""
    fuses_few: ClassVar[bool] = False
    """Whether it is faster for few proxies too."""
    free_norms: ClassVar[bool] = True
    """Whether `scale=None` leaves the norms free; False if the loss is made of cosines."""
    needs_whole: ClassVar[bool] = False
    """Whether every class must have the same number of proxies, one or more."""
    separable: ClassVar[bool] = True
    """Whether each embedding has a loss that can be weighted or returned."""
    usual_proxies: ClassVar[float] = 1.0
    """Proxies per class where none are asked for."""
    own_scale: ClassVar[bool] = True
    """Whether training leaves it its own scale where none is asked for."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Add the shared options to what `help` shows."""
        super().__init_subclass__(**given)
        cls.fusible = cls._form is not ProxyLoss._form
        if cls.__doc__:
            cls.__doc__ = cls.__doc__.rstrip() + OPTIONS

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None,
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        reduction: str = "mean",
        fused: bool | None = None,
        seed: int | None = None,
        proxies: Tensor | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        each = proxies_per_class
        self.check_options(
            num_classes, dim, proxies_per_class=each, assignment=assignment, scale=scale
        )
        name = type(self).__name__
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if isinstance(assignment, str):
            assignment = build_assignment(assignment, num_classes, each, generator=generator)
        if reduction not in REDUCTIONS:
            choices = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"unknown reduction {reduction!r}; choose from {choices}")
        if reduction != "mean" and not self.separable:
            raise ValueError(f"{name} has no reduction={reduction!r}: {NOT_SEPARABLE}")
        self.num_classes = num_classes
        self.dim = dim
        self.scale = scale
        self.assignment = assignment
        self.reduction = reduction
        chunks = self.fusible and assignment.by_label and reduction != "none"
        chunks = chunks and scale is not None and can_sum(scale, assignment.num_proxies)
        self.fused = fused if chunks else False
        shards = self.fused is not False and self.shards(assignment.name, scale)
        for option, is_missing in (
            ("fused", fused and not chunks),
            ("sharded", sharded and not shards),
        ):
            if is_missing:
                raise ValueError(
                    f"{name} with {assignment.name} assignment, scale={scale}, "
                    f"reduction={reduction!r} and fused={fused} has no {option} form; leave "
                    f"{option} out"
                )
        self.shard: Shard | None = own_shard(assignment.num_proxies) if sharded else None
        if proxies is None:
            first = first_proxies(assignment.num_proxies, dim, self.shard, generator)
        else:
            first = copy_proxies(proxies, assignment.num_proxies, dim, self.shard)
        self.proxies = nn.Parameter(first)
        self._work = Workspace()
        self._has_whole_batch = False

    def forward(
        self,
        embeddings: Array,
        labels: Array | None = None,
        indices_tuple: None = None,
        ref_emb: None = None,
        ref_labels: None = None,
        *,
        positives: Array | None = None,
        negatives: Array | None = None,
        weights: Array | None = None,
    ) -> Tensor:
        """Return the loss over the batch's triplets (x, p(y), p(Z)), reduced by `reduction`.

        labels: (B,); or, instead of them:
        positives, negatives: (B, D), and (B, D) or (B, K, D).
        weights: (B,) of the anchors; the mean is then Σ w·loss / Σ w.
        """
        if indices_tuple is not None:
            raise ValueError("losses over proxies need no mined pairs; leave out the miner")
        if ref_emb is not None or ref_labels is not None:
            raise ValueError("losses over proxies compare with proxies; leave ref_emb out")
        x = check_embeddings(embeddings, self.dim)
        if weights is not None:
            if not self.separable:
                raise ValueError(f"{type(self).__name__} takes no weights: {NOT_SEPARABLE}")
            weights = check_weights(weights, x)
        if not self.separable and self.training and not self._has_whole_batch:
            self._check_whole_batch(x)
        with without_autocast(x):
            x, proxies = full_precision(x, self.proxies), full_precision(self.proxies, x)
            if labels is None:
                y, z = check_triplets(x, positives, negatives)
                y, z = (self._place(full_precision(each, x)) for each in (y, z))
                x, p = self._place(x), self._place(proxies)
                triplets = self.assignment.from_triplets(y, z, p)
                return self._plain(x, p, triplets, weights) * one_or_nan(x, y, z)
            if positives is not None or negatives is not None:
                raise ValueError("got labels and triplets; pass one of the two")
            labels = check_labels(labels, x, self.num_classes)
            if self.training and not self.assignment.is_settled(labels):
                self.assignment.settle(self._place(x), labels, self._place(proxies))
            if self._chunks(x, proxies, weights):
                return self._chunked(x, self.assignment.of(x, labels, proxies), proxies, weights)
            x, p = self._place(x), self._place(proxies)
            triplets = self.assignment.from_labels(x, labels, p)
            loss = self._plain(x, p, triplets, weights)
            return loss * one_or_nan(x) if isinstance(self.assignment, Dynamic) else loss

    def logits(self, embeddings: Array) -> Tensor:
        """Return scale · cos(x, p), or −|x − p|² with free norms, of every proxy: (B, P)."""
        x = check_embeddings(embeddings, self.dim)
        with without_autocast(x):
            x, p = full_precision(x, self.proxies), full_precision(self.proxies, x)
            return self._logits(self._place(x), self._place(p))

    @torch.no_grad()
    def assign(self, embeddings: Array, labels: Array | None = None) -> Tensor:
        """Return p(x) of each embedding, rows of `proxies`, as in training.

        But for matched assignment, which depends on the batch: here each gets the closest. Pass raw
        embeddings: with free norms the closest proxy depends on their length.
        """
        x = check_embeddings(embeddings, self.dim)
        if labels is not None:
            labels = check_labels(labels, x, self.num_classes)
        x, p = full_precision(x, self.proxies), full_precision(self.proxies, x)
        return self.assignment.of(self._place(x), labels, self._place(p))

    @abstractmethod
    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        """Return losses (T,), or () if not separable, of placed anchors (T, D) and proxies."""

    @classmethod
    def of_scale(cls, scale: float) -> dict[str, float]:
        """Return the keyword that sets this scale of the cosine."""
        return {"scale": scale}

    def _form(self, batch: int) -> Form:
        """Return the chunked form for a batch of this size, if `fusible`."""
        raise NotImplementedError

    def _chunks(self, x: Tensor, proxies: Tensor, weights: Tensor | None) -> bool:
        """Return whether this batch takes the chunked form; it has no gradient by the weights."""
        can = self.fused is not False and not torch.compiler.is_compiling()
        can = can and not (weights is not None and weights.requires_grad)
        if self.shard is not None:
            if not can:
                raise RuntimeError(
                    "a sharded loss has no plain form, which torch.compile and a gradient by the "
                    "weights need; drop sharded"
                )
            return True
        return can and (bool(self.fused) or self.fuses_few or pays(len(x), *proxies.shape))

    def _chunked(
        self, x: Tensor, positive: Tensor, proxies: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the loss in chunks, with p(x) by label; weights become shares of the mean."""
        shares = None
        if self.reduction == "sum":
            shares = x.new_ones(len(x)) if weights is None else weights.to(x.dtype)
        elif weights is not None:
            shares = (weights / weights.sum()).to(x.dtype)
        assert self.scale is not None
        form = self._form(len(x))
        loss = Chunked(form, self._plain_of_shares, self.scale, self.shard, self._work)
        return loss(x, positive, proxies, shares)

    def _plain_of_shares(
        self, x: Tensor, positive: Tensor, proxies: Tensor, shares: Tensor | None
    ) -> Tensor:
        """Return what `_chunked` computes, by autograd."""
        losses = self._losses(self._place(x), self._place(proxies), ProxyTriplets(positive))
        if not self.separable:
            return losses
        return losses.mean() if shares is None else losses @ shares

    def _plain(
        self, x: Tensor, p: Tensor, triplets: ProxyTriplets, weights: Tensor | None
    ) -> Tensor:
        """Return the plain form of placed x and p."""
        if len(triplets.positive) == 0:
            loss = zero_with_graph(x) + zero_with_graph(p)
            return loss.expand(len(x)) if self.reduction == "none" else loss
        anchors = x if triplets.anchor is None else x[triplets.anchor]
        losses = self._losses(anchors, p, triplets)
        if not self.separable:
            return losses
        return reduce_losses(losses, triplets.anchor, weights, len(x), self.reduction)

    def _place(self, x: Tensor) -> Tensor:
        """Return the direction of x, or x itself with free norms."""
        return x if self.scale is None else normalize(x)

    def _logits(self, x: Tensor, p: Tensor) -> Tensor:
        """Return `proxy_logits` of placed embeddings and proxies."""
        return -squared_distances(x, p) if self.scale is None else self.scale * (x @ p.T)

    def _check_whole_batch(self, x: Tensor) -> None:
        """Refuse a part of a batch where several processes train: once, as all call the loss."""
        if together() and not torch.compiler.is_compiling():
            whole = rows_of_all(x.detach())
            if any(len(each) != len(x) or not torch.equal(each, x.detach()) for each in whole):
                raise ValueError(
                    f"the processes have different batches; {type(self).__name__} sums over the "
                    "batch inside a logarithm, so the mean of their losses is another loss: pass "
                    "the whole batch to each, with nofuss.distributed.shard.gather"
                )
        self._has_whole_batch = True

    @classmethod
    def shards(cls, assignment: str, scale: float | None) -> bool:
        """Return whether proxies can be distributed: p(x) by label, equal norms, a fused form."""
        return cls.fusible and assignment in ("static", "fractional") and scale is not None

    @classmethod
    def check_options(
        cls,
        num_classes: int,
        dim: int,
        *,
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        scale: float | None = 1.0,
    ) -> None:
        """Raise ValueError for options that the loss can't have; nothing is built."""
        if num_classes < 2 or dim < 1:
            raise ValueError(
                f"got num_classes={num_classes}, dim={dim}; expected two classes or more, since "
                "negatives are of other classes, and dim from 1 up"
            )
        is_whole = float(proxies_per_class).is_integer()
        if not 0 < proxies_per_class < math.inf or (cls.needs_whole and not is_whole):
            number = "a whole number above 0" if cls.needs_whole else "above 0"
            raise ValueError(f"proxies_per_class is {proxies_per_class}; expected {number}")
        if not cls.free_norms if scale is None else not 0 < scale < math.inf:
            allowed = ", or None for free norms" if cls.free_norms else ""
            raise ValueError(f"scale is {scale}; expected above 0{allowed}")
        if isinstance(assignment, str):
            kind: Assignment | type[Assignment]
            kind = kind_of(assignment, num_classes, proxies_per_class)
            num_proxies = count_proxies(num_classes, proxies_per_class)
        else:
            kind, num_proxies = assignment, assignment.num_proxies
        if kind.name not in cls.takes:
            raise ValueError(
                f"{cls.__name__} does not take {kind.name} assignment; "
                f"choose from {', '.join(name for name in NAMES if name in cls.takes)}"
            )
        if kind.num_classes not in (None, num_classes):
            raise ValueError(
                f"the assignment is made for {kind.num_classes} classes but the loss for "
                f"{num_classes}; make them equal"
            )
        if num_proxies < 2:
            raise ValueError(
                f"{num_classes} classes × {proxies_per_class} proxies a class is one proxy; "
                "a positive and a negative need two: raise proxies_per_class"
            )


def reduce_losses(
    losses: Tensor, anchor: Tensor | None, weights: Tensor | None, batch: int, reduction: str
) -> Tensor:
    """Reduce losses of triplets (T,), weighted by their anchors, to a scalar or to one an anchor.

    anchor: (T,) the row of each triplet's anchor in the batch; None: triplet t is of row t.

    "none" gives each of the `batch` embeddings the mean over its triplets times its weight, 0 if
    it has none; "sum" is the sum of that. The mean is over triplets, equally weighted without
    `weights`: an anchor with more positives counts more.
    """
    if reduction == "mean" and weights is None:
        return losses.mean()
    each = losses.new_ones(batch) if weights is None else weights.to(losses.dtype)
    if reduction == "mean":
        each = each if anchor is None else each[anchor]
        return (losses * each).sum() / _nonzero(each.sum())
    if anchor is not None:
        zeros = losses.new_zeros(batch)
        count = zeros.index_add(0, anchor, torch.ones_like(losses))
        losses = zeros.index_add(0, anchor, losses) / _nonzero(count)
    return losses * each if reduction == "none" else (losses * each).sum()


def _nonzero(count: Tensor) -> Tensor:
    return torch.where(count == 0, 1.0, count)
