"""The shell of every loss over proxies: proxies, assignment, norms, one calling convention.

Norms. The paper trains with free norms and analyses equal ones: |x| = N_x, |p| = N_p. With
equal norms −d(x,p) = 2·N_x·N_p·cos(x,p) − N_x² − N_p², and the constants cancel in every loss
here. So the two norms are one number, `scale` = 2·N_x·N_p, times the cosine of two directions.
`scale=None` leaves the norms free: d(x,p) = |x − p|² of the vectors as they are.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, TypedDict

import torch
from torch import Tensor, nn

from nofuss.geometry import Array, normalize, squared_distances
from nofuss.losses.collectives import to_shards
from nofuss.losses.fused import pays
from nofuss.losses.inputs import check_embeddings, check_labels, without_autocast, zero_with_graph
from nofuss.proxies.assignment import Assignment, Dynamic, ProxyTriplets, build_assignment
from nofuss.proxies.shard import Shard, first_proxies, own_shard


def proxy_logits(x: Tensor, p: Tensor, scale: float | Tensor | None) -> Tensor:
    """−d(x, p) but for a constant, (B, D) × (P, D) → (B, P): scale·cos, or −|x − p|² if None."""
    if scale is None:
        return -squared_distances(x, p)
    return scale * (normalize(x) @ normalize(p).T)


class ProxyOptions(TypedDict, total=False):
    """What every loss over proxies takes beside its own; see `ProxyLoss`."""

    proxies_per_class: float
    assignment: str | Assignment
    learn_scale: bool
    fused: bool | None
    seed: int | None
    sharded: bool


class ProxyLoss(nn.Module, ABC):
    """`criterion(embeddings, labels)`, or `criterion(anchors, positives=…, negatives=…)`.

    `proxies` is one parameter (num_proxies, dim), float32 whatever the input's precision;
    give it to the optimizer with a rate of its own, often 100 times the backbone's.

    num_classes: labels are 0 … num_classes − 1.
    proxies_per_class: below 1 labels share proxies, above 1 a label has several.
    assignment: "static", "dynamic", or an `Assignment`. Without labels (bare triplets) use
        "dynamic"; num_classes × proxies_per_class is then just the number of proxies.
    scale: 2·N_x·N_p, see this file's head; None leaves the norms free, as the paper trains.
    learn_scale: learn the scale, as exp(log_scale).
    fused: one autograd function instead of many, which walks many proxies in chunks that stay in
        cache; values and gradients are the plain form's, but it can't be differentiated twice.
        None does so when it pays, True and False always and never. Where norms are free, or Z
        is not simply every other proxy, the plain form is all there is.
    seed: of the first proxies and the deal of labels; None draws from torch's global generator.
    sharded: `proxies` are this process's rows alone, of as many in all as there are processes to
        share them (`nofuss.processes.joined`). Every process hands in the same, whole batch (see
        `losses/collectives.py`), and gets the same loss as one process with all proxies would.
    """

    takes: ClassVar[tuple[str, ...]] = ("static", "fractional", "several", "dynamic")
    fusible: ClassVar[bool] = True
    """Whether there is a fused form."""
    fuses_few: ClassVar[bool] = False
    """Whether the fused form pays for few proxies too."""
    needs_scale: ClassVar[bool] = True
    """False where the scale only trades with the margin."""
    can_shard: ClassVar[bool] = True
    """Whether its proxies can be dealt out over processes."""

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        proxies_per_class: float = 1.0,
        assignment: str | Assignment = "static",
        scale: float | None,
        learn_scale: bool = False,
        fused: bool | None = None,
        seed: int | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2 or dim < 1:
            raise ValueError(
                f"got num_classes={num_classes}, dim={dim}; proxies are told apart from other "
                "classes' proxies, so there must be two classes or more, and dim from 1 up"
            )
        if not 0 < proxies_per_class < math.inf:
            raise ValueError(f"proxies_per_class is {proxies_per_class}; expected above 0")
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}; expected above 0, or None for free norms")
        if learn_scale and scale is None:
            raise ValueError("learn_scale needs a scale to start from; got scale=None")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if isinstance(assignment, str):
            assignment = build_assignment(
                assignment,
                num_classes,
                proxies_per_class,
                generator=generator,
                seed=seed or 0,
            )
        if assignment.name not in self.takes:
            raise ValueError(
                f"{type(self).__name__} does not go with {assignment.name} assignment; "
                f"it takes {', '.join(self.takes)}"
            )
        if assignment.num_classes not in (None, num_classes):
            raise ValueError(
                f"the assignment is made for {assignment.num_classes} classes but the loss for "
                f"{num_classes}; make them equal"
            )
        if assignment.num_proxies < 2:
            raise ValueError(
                f"{num_classes} classes × {proxies_per_class} proxies a class is one proxy; "
                "a positive and a negative need two: raise proxies_per_class"
            )
        self.num_classes = num_classes
        self.dim = dim
        self.assignment = assignment
        can_fuse = self.fusible and assignment.by_label and scale is not None
        if fused and not can_fuse:
            raise ValueError(
                f"{type(self).__name__} with {assignment.name} assignment and scale={scale} has "
                "no fused form; leave fused out"
            )
        self.fused = fused if can_fuse else False
        if sharded and not self.can_shard:
            raise ValueError(f"{type(self).__name__} can't be sharded; leave sharded out")
        self.shard: Shard | None = own_shard(assignment.num_proxies) if sharded else None
        assignment.shard = self.shard
        first = first_proxies(assignment.num_proxies, dim, self.shard, generator)
        self.proxies = nn.Parameter(first)
        self._scale = scale
        if learn_scale:
            assert scale is not None
            self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def scale(self) -> float | Tensor | None:
        """2·N_x·N_p: a number, a tensor when it is learned, None when norms are free."""
        if "log_scale" not in self._parameters:
            return self._scale
        return self.log_scale.exp() if self.shard is None else to_shards(self.log_scale).exp()

    def forward(
        self,
        embeddings: Tensor,
        labels: Array | None = None,
        indices_tuple: None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the batch's triplets (x, p(y), p(Z)).

        Labels (B,), or instead of them positives (B, D) and negatives (B, D) or (B, K, D).
        """
        if indices_tuple is not None:
            raise ValueError("losses over proxies need no mined pairs; leave out the miner")
        check_embeddings(embeddings, self.dim)
        if self.shard is not None:
            embeddings = to_shards(embeddings)
        with without_autocast(embeddings):
            if labels is not None:
                if positives is not None or negatives is not None:
                    raise ValueError("got labels and triplets; pass one of the two")
                labels = check_labels(labels, embeddings, self.num_classes)
                proxies = self.proxies  # looked up once: over few, microseconds count
                if self.fused or (
                    self.fused is None and (self.fuses_few or pays(len(embeddings), *proxies.shape))
                ):
                    wide = embeddings.dtype == proxies.dtype
                    x = embeddings if wide else self._widen(embeddings)
                    return self._fused_loss(x, self.assignment.of(x, labels, proxies), proxies)
            x = self._place(embeddings)
            if isinstance(self.assignment, Dynamic):
                self.assignment.revive(x, self.proxies)
            p = self._place(self.proxies).to(x.dtype)
            if labels is not None:
                triplets = self.assignment.from_labels(x, labels, p)
            else:
                y, z = self._check_triplets(embeddings, positives, negatives)
                triplets = self.assignment.from_triplets(self._place(y), self._place(z), p)
            if len(triplets.positive) == 0:
                return zero_with_graph(x) + zero_with_graph(self.proxies)
            return self._loss(x if triplets.anchor is None else x[triplets.anchor], p, triplets)

    @torch.no_grad()
    def assign(self, embeddings: Tensor, labels: Array | None = None) -> Tensor:
        """p(x) for each embedding, as rows of `proxies`."""
        check_embeddings(embeddings, self.dim)
        if labels is not None:
            labels = check_labels(labels, embeddings, self.num_classes)
        x = self._place(embeddings)
        return self.assignment.of(x, labels, self._place(self.proxies).to(x.dtype))

    @abstractmethod
    def _loss(self, x: Tensor, p: Tensor, triplets: ProxyTriplets) -> Tensor:
        """The loss of placed anchors x (T, D) and placed proxies p (P, D)."""

    def _fused_loss(self, embeddings: Tensor, positive: Tensor, proxies: Tensor) -> Tensor:
        """The same of embeddings (B, D) and rows of the proxies (B,), Z every other proxy."""
        raise NotImplementedError

    def _place(self, x: Tensor) -> Tensor:
        """As a direction, or as it is with free norms."""
        x = self._widen(x)
        return x if self._scale is None else normalize(x)

    def _widen(self, x: Tensor) -> Tensor:
        """At least in the proxies' precision."""
        return x.to(torch.promote_types(x.dtype, self.proxies.dtype))

    def _logits(self, x: Tensor, p: Tensor) -> Tensor:
        """`proxy_logits` of what is already placed."""
        scale = self.scale
        return -squared_distances(x, p) if scale is None else scale * (x @ p.T)

    def _check_triplets(
        self, x: Tensor, positives: Tensor | None, negatives: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if positives is None or negatives is None:
            raise ValueError("got no labels; pass them, or both positives= and negatives=")
        if negatives.ndim == 2:
            negatives = negatives[:, None]  # (B, 1, D)
        b, d = x.shape
        k = negatives.shape[1] if negatives.ndim == 3 else 0
        if positives.shape != (b, d) or k < 1 or negatives.shape != (b, k, d):
            raise ValueError(
                f"anchors are {tuple(x.shape)}, positives {tuple(positives.shape)}, negatives "
                f"{tuple(negatives.shape)}; expected (B, D), (B, D) and (B, D) or (B, K, D)"
            )
        return positives, negatives
