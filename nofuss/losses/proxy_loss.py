"""The shell of every loss over proxies: proxies, assignment, norms, one calling convention.

Norms. The paper trains with free norms and analyses equal ones: |x| = N_x, |p| = N_p. With
equal norms −d(x,p) = 2·N_x·N_p·cos(x,p) − N_x² − N_p², and the constants cancel in every loss
here. So the two norms are one number, `scale` = 2·N_x·N_p, times the cosine of two directions.
`scale=None` leaves the norms free: d(x,p) = |x − p|² of the vectors as they are.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from nofuss.distributed.shard import Shard, copy_proxies, first_proxies, own_shard, to_shards
from nofuss.geometry import Array, is_traced, normalize, squared_distances
from nofuss.losses.fast.fused import pays
from nofuss.losses.inputs import (
    check_embeddings,
    check_labels,
    check_triplets,
    check_weights,
    full_precision,
    one_or_nan,
    without_autocast,
)
from nofuss.losses.reduction import (
    NOT_SEPARABLE,
    anchor_shares,
    check_reduction,
    no_losses,
    reduce_losses,
)
from nofuss.proxies.assignment import Assignment, Dynamic, ProxyTriplets
from nofuss.proxies.by_name import NAMES, build_assignment, count_proxies, kind_of


def proxy_logits(x: Tensor, p: Tensor, scale: float | None) -> Tensor:
    """Return −d(x, p) up to a constant, (B, D) × (P, D) → (B, P): scale·cos, or −|x − p|²."""
    x, p = full_precision(x, p), full_precision(p, x)
    if scale is None:
        return -squared_distances(x, p)
    return scale * (normalize(x) @ normalize(p).T)


class ProxyLoss(nn.Module, ABC):
    """`criterion(embeddings, labels)`, or `criterion(anchors, positives=…, negatives=…)`.

    `proxies` is one parameter (num_proxies, dim), float32 whatever the input's precision; give it
    to the optimizer with a separate rate, often 100 times that of the backbone. Options are
    described in `ProxyNCA`.
    """

    takes: ClassVar[tuple[str, ...]] = ("static", "fractional", "several", "dynamic", "balanced")
    fusible: ClassVar[bool] = True
    """Whether there is a fused form."""
    fuses_few: ClassVar[bool] = False
    """Whether the fused form is faster for few proxies too."""
    needs_scale: ClassVar[bool] = True
    """False if another scale is the same as another margin."""
    free_norms: ClassVar[bool] = True
    """Whether `scale=None` leaves the norms free; False if the loss is made of cosines."""
    needs_whole: ClassVar[bool] = False
    """Whether every class must have the same number of proxies, one or more."""
    separable: ClassVar[bool] = True
    """Whether each embedding has a loss that can be weighted or returned."""

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        scale: float | None = 18.0,
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        reduction: str = "mean",
        fused: bool | None = None,
        seed: int | None = None,
        proxies: Tensor | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.check_options(
            num_classes,
            dim,
            proxies_per_class=proxies_per_class,
            assignment=assignment,
            scale=scale,
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if isinstance(assignment, str):
            assignment = build_assignment(
                assignment, num_classes, proxies_per_class, generator=generator
            )
        self.num_classes = num_classes
        self.dim = dim
        self.scale = scale
        self.assignment = assignment
        self.reduction = check_reduction(reduction, type(self).__name__, separable=self.separable)
        can_fuse = self.fusible and assignment.by_label and scale is not None
        can_fuse = can_fuse and reduction != "none"
        if fused and not can_fuse:
            raise ValueError(
                f"{type(self).__name__} with {assignment.name} assignment, scale={scale} and "
                f"reduction={reduction!r} has no fused form; leave fused out"
            )
        self.fused = fused if can_fuse else False
        if sharded and not (self.fused is not False and self.shards(assignment.name, scale)):
            raise ValueError(
                f"{type(self).__name__} with {assignment.name} assignment, scale={scale}, "
                f"reduction={reduction!r} and fused={fused} can't be sharded; leave sharded out: "
                "every process then holds all proxies"
            )
        self.shard: Shard | None = own_shard(assignment.num_proxies) if sharded else None
        if proxies is None:
            first = first_proxies(assignment.num_proxies, dim, self.shard, generator)
        else:
            first = copy_proxies(proxies, assignment.num_proxies, dim, self.shard)
        self.proxies = nn.Parameter(first)

    def forward(
        self,
        embeddings: Tensor,
        labels: Array | None = None,
        indices_tuple: None = None,
        ref_emb: None = None,
        ref_labels: None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        weights: Array | None = None,
    ) -> Tensor:
        """Return the loss over the batch's triplets (x, p(y), p(Z)), reduced by `reduction`.

        labels: (B,); or, instead of them:
        positives, negatives: (B, D), and (B, D) or (B, K, D).
        weights: (B,) of the embeddings; the mean is then Σ w·loss / Σ w.
        """
        if indices_tuple is not None:
            raise ValueError("losses over proxies need no mined pairs; leave out the miner")
        if ref_emb is not None or ref_labels is not None:
            raise ValueError("losses over proxies compare with proxies; leave ref_emb out")
        check_embeddings(embeddings, self.dim)
        weights = None if weights is None else self._check_weights(weights, embeddings)
        if self.shard is not None:
            if is_traced():
                raise RuntimeError("torch.compile and torch.func need all proxies; drop sharded")
            embeddings = to_shards(embeddings)
        with without_autocast(embeddings):
            if labels is None:
                y, z = check_triplets(embeddings, positives, negatives)
                x, y, z = (self._place(each) for each in (embeddings, y, z))
                p = self._place(self.proxies, embeddings)
                triplets = self.assignment.from_triplets(y, z, p)
                return self._reduced(x, p, triplets, weights, one_or_nan(x, y, z))
            if positives is not None or negatives is not None:
                raise ValueError("got labels and triplets; pass one of the two")
            labels = check_labels(labels, embeddings, self.num_classes)
            proxies = self.proxies  # looked up once: with few proxies microseconds count
            if self.training and not self.assignment.is_settled(labels):
                p = self._place(proxies, embeddings)
                self.assignment.settle(self._place(embeddings), labels, p)
            if self._fuses(embeddings, proxies, weights):
                positive = self.assignment.of(embeddings, labels, proxies)
                share = anchor_shares(weights, embeddings, self.reduction)
                return self._fused_loss(embeddings, positive, proxies, share)
            x, p = self._place(embeddings), self._place(proxies, embeddings)
            triplets = self.assignment.from_labels(x, labels, p)
            sound = one_or_nan(x) if isinstance(self.assignment, Dynamic) else None
            return self._reduced(x, p, triplets, weights, sound)

    def logits(self, embeddings: Tensor) -> Tensor:
        """Return scale · cos(x, p), or −|x − p|² with free norms, of every proxy: (B, P)."""
        check_embeddings(embeddings, self.dim)
        with without_autocast(embeddings):
            return self._logits(self._place(embeddings), self._place(self.proxies, embeddings))

    @torch.no_grad()
    def assign(self, embeddings: Tensor, labels: Array | None = None) -> Tensor:
        """Return p(x) of each embedding, rows of `proxies`, as in training.

        Pass raw embeddings: with free norms the closest proxy depends on their length.
        """
        check_embeddings(embeddings, self.dim)
        if labels is not None:
            labels = check_labels(labels, embeddings, self.num_classes)
        p = self._place(self.proxies, embeddings)
        return self.assignment.of(self._place(embeddings), labels, p)

    @abstractmethod
    def _losses(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        """Return losses (T,), or () if not separable, of placed anchors (T, D) and proxies."""

    def _fused_loss(
        self, embeddings: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None
    ) -> Tensor:
        """Return the loss of embeddings (B, D) with positives (B,) against all others: `Form`."""
        raise NotImplementedError

    def _fuses(self, x: Tensor, proxies: Tensor, weights: Tensor | None) -> bool:
        """Return whether this batch takes the fused form, which has no gradient by the weights."""
        if weights is not None and weights.requires_grad:
            if self.shard is not None:
                raise ValueError("a sharded loss has no gradient by its weights; detach them")
            return False
        if self.fused is False:
            return False
        return (
            bool(self.fused)
            or self.shard is not None
            or self.fuses_few
            or pays(len(x), *proxies.shape)
        )

    def _reduced(
        self,
        x: Tensor,
        p: Tensor,
        triplets: ProxyTriplets,
        weights: Tensor | None,
        sound: Tensor | None,
    ) -> Tensor:
        """Return the plain form times `sound`: NaN if what chooses proxies is not finite."""
        if len(triplets.positive) == 0:
            loss = no_losses(x, self.proxies, self.reduction)
        else:
            anchors = x if triplets.anchor is None else x[triplets.anchor]
            loss = self._losses(anchors, p, triplets)
            if self.separable:
                loss = reduce_losses(loss, triplets, weights, len(x), self.reduction)
        return loss if sound is None else loss * sound

    def _place(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return x in full precision: its direction, or x itself with free norms."""
        x = full_precision(x, *others, self.proxies)
        return x if self.scale is None else normalize(x)

    def _logits(self, x: Tensor, p: Tensor) -> Tensor:
        """Return `proxy_logits` of placed embeddings and proxies."""
        return -squared_distances(x, p) if self.scale is None else self.scale * (x @ p.T)

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
        if not 0 < proxies_per_class < math.inf:
            raise ValueError(f"proxies_per_class is {proxies_per_class}; expected above 0")
        if cls.needs_whole and not float(proxies_per_class).is_integer():
            raise ValueError(
                f"proxies_per_class is {proxies_per_class}; {cls.__name__} needs a whole number "
                "from 1 up, as every class has the same number of centers"
            )
        if scale is None and not cls.free_norms:
            raise ValueError(
                f"scale is None; expected a number, as {cls.__name__} is made of cosines"
            )
        if scale is not None and not 0 < scale < math.inf:
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

    def _check_weights(self, weights: Array, x: Tensor) -> Tensor:
        if not self.separable:
            raise ValueError(f"{type(self).__name__} takes no weights: {NOT_SEPARABLE}")
        return check_weights(weights, x)
