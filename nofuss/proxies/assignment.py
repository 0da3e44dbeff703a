"""The proxy p(x) of each item x: Eq. 5 and "Proxy Assignment" (Section 4.1) of the paper.

An assignment turns a batch into triplets over proxies (x, p(y), p(Z)):

    Static       one proxy a label, p(x) = p_c(x); no sampling at all
    Sampled      the same with p(Z) of the batch's labels only: Algorithm 1 as it is written
    Fractional   fewer proxies than labels; each label gets a random proxy, once
    Several      more proxies than labels; p(x) is the closest proxy of the label
    Dynamic      proxies belong to no label; p(x) is the closest of all at the moment (Eq. 5);
                 matched: the labels of a batch choose together, each another proxy
    Balanced     labels choose the closest proxy, evenly, once

In all of them p(Z) never contains p(y): a negative that shares the positive's proxy would ask
for d(x, p) < d(x, p), which carries no signal, so it is left out of the denominator.
"""

import math
import warnings
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nofuss.distributed.processes import rows_of_all, together
from nofuss.geometry import normalize, squared_distances

FREE = -1
"""The proxy of a label that has not chosen yet (`Balanced`)."""


class ProxyTriplets(NamedTuple):
    """Triplets over proxies (x, p(y), p(Z)), T of them."""

    positive: Tensor
    """(T,) row of p(y) among the proxies."""
    negative: Tensor | None = None
    """(T, P) True where a proxy is in p(Z). None: every one but p(y)."""
    anchor: Tensor | None = None
    """(T,) row of x in the batch. None: triplet t belongs to row t."""


class Assignment(nn.Module, ABC):
    """Assigns p(x) to a batch; its buffers are part of the loss's state_dict."""

    name: str
    by_label: ClassVar[bool] = False
    """Whether p(x) depends on the label alone, and p(Z) is every other proxy."""
    num_proxies: int
    num_classes: int | None = None
    """Labels are below it; None where proxies belong to no label."""

    @abstractmethod
    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return p(x) for each row of x: (N,) rows of `proxies`."""

    def from_labels(self, x: Tensor, labels: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return triplets over proxies from a labelled batch: (x, p(x), all others)."""
        return ProxyTriplets(positive=self.of(x, labels, proxies))

    def from_triplets(self, y: Tensor, z: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return triplets over proxies from positives y (B, D) and negatives z (B, K, D)."""
        raise ValueError(
            f"got triplets without labels; {self.name} assignment needs labels: pass them, or "
            "assignment='dynamic'"
        )

    def is_settled(self, labels: Tensor) -> bool:
        """Return whether these labels have no proxy left to choose."""
        return True

    def settle(self, x: Tensor, labels: Tensor, proxies: Tensor) -> None:
        """Let labels that are not settled choose their proxies, before a training batch."""


class Static(Assignment):
    """One proxy a label, p(x) = p_c(x); Z is every other proxy."""

    name = "static"
    by_label = True

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = self.num_proxies = num_classes

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the label itself."""
        return required(labels, self.name)


class Sampled(Assignment):
    """Static assignment with the sampled Z of Algorithm 1: the items of other labels in the batch.

    p(Z) holds the proxy of each of those labels once; an anchor without a negative is left out.
    `Static` needs no sample, since its Z is every other proxy: this form shows what that is worth.
    """

    name = "sampled"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = self.num_proxies = num_classes

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the label itself."""
        return required(labels, self.name)

    def from_labels(self, x: Tensor, labels: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return (x, p(x), the proxies of the other labels of the batch)."""
        return within_batch(labels, self.num_proxies)


class Fractional(Assignment):
    """Fewer proxies than labels (Section 6.5): labels are distributed over proxies at random, once.

    Evenly: every proxy gets ⌊C/P⌋ or ⌈C/P⌉ labels. p(Z) is every proxy but p(y), so labels that
    share the anchor's proxy are no negatives of it.
    """

    name = "fractional"
    by_label = True
    proxy_of_label: Tensor

    def __init__(
        self, num_classes: int, num_proxies: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.num_classes, self.num_proxies = num_classes, num_proxies
        proxy_of_label = torch.randperm(num_classes, generator=generator) % num_proxies
        self.register_buffer("proxy_of_label", proxy_of_label)

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the label's proxy."""
        return self.proxy_of_label[required(labels, self.name)]


class Several(Assignment):
    """More proxies than labels: each label owns ⌊P/C⌋ or ⌈P/C⌉ neighbouring rows.

    p(x) is the closest proxy of the label (Eq. 5 within the label); p(Z) is every proxy of
    another label. A label's other proxies are neither positive nor negative.
    """

    name = "several"
    label_of_proxy: Tensor

    def __init__(self, num_classes: int, num_proxies: int) -> None:
        super().__init__()
        self.num_classes, self.num_proxies = num_classes, num_proxies
        owner = torch.arange(num_proxies) * num_classes // num_proxies
        self.register_buffer("label_of_proxy", owner)

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the closest proxy of the label."""
        labels = required(labels, self.name)
        is_own = labels[:, None] == self.label_of_proxy  # (N, P)
        with torch.no_grad():
            return squared_distances(x, proxies).masked_fill(~is_own, math.inf).argmin(1)

    def from_labels(self, x: Tensor, labels: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return (x, the closest of the label's proxies, all proxies of other labels)."""
        return ProxyTriplets(
            positive=self.of(x, labels, proxies),
            negative=labels[:, None] != self.label_of_proxy,
        )


class Dynamic(Assignment):
    """p(x) is the closest proxy at the moment (Eq. 5); proxies belong to no label.

    From labels, an anchor's positives y are the *other* items of its label in the batch and
    its negatives the items of other labels; each (x, y) is one triplet with
    p(Z) = {p(z)} \\ {p(y)}, each proxy counted once. From bare triplets the same, with y and Z
    as given. Instances y, z only choose proxies: gradients reach x and the chosen proxies.
    A triplet whose p(Z) is empty is left out; if all are, the loss is zero (with a graph).

    Proxies that are never the closest get no gradient and stay behind; in the worst case all
    points share one proxy and nothing is learned. `fraction_in_use` reports it, and one warning is
    given. Under torch.func use is not counted. The number of triplets depends on the values, so
    torch.compile breaks the graph here, and torch.vmap refuses it.

    matched: departs from Eq. 5, needs labels, and does not collapse (docs/dynamic.md). In each
        batch a label takes one proxy for all its items, no two labels the same, such that the means
        of the labels are closest to their proxies in all; where labels outnumber proxies, they
        share them evenly. Each x has one triplet, with p(Z) the other proxies that were taken.
    """

    name = "dynamic"
    idle: Tensor
    batches: Tensor

    def __init__(self, num_proxies: int, *, matched: bool = False) -> None:
        super().__init__()
        self.num_proxies, self.matched = num_proxies, matched
        self.name = "matched" if matched else "dynamic"
        self._warned = False
        self.register_buffer("idle", torch.zeros(num_proxies, dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the closest proxy, Eq. 5."""
        with torch.no_grad():
            return squared_distances(x, proxies).argmin(1)

    def from_labels(self, x: Tensor, labels: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return (x, p(y), p(Z)) for every positive pair (x, y) of the batch, or for every x."""
        if self.matched:
            chosen = self._match(x, labels, proxies)
            self._count(chosen)
            return within_batch(chosen, self.num_proxies)
        chosen = self.of(x, None, proxies)  # (B,)
        self._count(chosen)
        same = labels[:, None] == labels
        pairs = same & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        anchor, other = pairs.nonzero(as_tuple=True)  # (T,)
        holds = one_hot(chosen, self.num_proxies).to(x.dtype)  # (B, P)
        # (B, P), the proxies of x's negatives: a product, where a mask would be (B, B, P).
        of_others = ((~same).to(x.dtype) @ holds) > 0
        return without_empty(chosen[other], of_others[anchor], anchor)

    def from_triplets(self, y: Tensor, z: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Return (x, p(y), p(Z)) with y and Z as given, one triplet a row."""
        if self.matched:
            return super().from_triplets(y, z, proxies)
        positive = self.of(y, None, proxies)  # (B,)
        chosen = self.of(z.flatten(0, 1), None, proxies).view(z.shape[:2])  # (B, K)
        self._count(torch.cat([positive, chosen.flatten()]))
        negative = torch.zeros(len(y), self.num_proxies, dtype=torch.bool, device=y.device)
        negative = negative.scatter(1, chosen, True)
        return without_empty(positive, negative, torch.arange(len(y), device=y.device))

    @torch.no_grad()
    def _match(self, x: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """Return one proxy for the items of each label, (B,): the closest ones, all different."""
        from scipy.optimize import linear_sum_assignment  # takes long to import

        present, group = torch.unique(labels, return_inverse=True)
        sums = x.new_zeros(len(present), x.shape[1]).index_add_(0, group, x)
        means = sums / torch.bincount(group)[:, None]
        d = squared_distances(means, proxies)  # (L, P)
        d = d.nan_to_num(0.0, posinf=0.0)  # any choice will do: the loss is NaN then
        rounds = math.ceil(len(present) / self.num_proxies)
        columns = linear_sum_assignment(d.repeat(1, rounds).tolist())[1]
        return torch.tensor(columns % self.num_proxies).to(labels)[group]

    def fraction_in_use(self, window: int = 100) -> float:
        """Return the fraction of proxies that were chosen in the last `window` training batches."""
        seen = min(window, int(self.batches))
        return float((self.idle < seen).float().mean())

    def _count(self, chosen: Tensor) -> None:
        if not self.training:
            return
        idle = self.idle + 1
        try:
            idle[chosen] = 0
            self.idle.copy_(idle)
            self.batches += 1
        except RuntimeError:  # torch.func refuses to change a tensor from outside
            return
        # Long enough for every proxy to have been chosen ten times, had the choice been even.
        window = max(100, 10 * self.num_proxies // max(1, len(chosen)))
        if not self._warned and self.batches >= window and self.fraction_in_use(window) < 0.1:
            self._warned = True
            used = round(self.fraction_in_use(window) * self.num_proxies)
            warnings.warn(
                f"dynamic assignment is collapsing: {used} of {self.num_proxies} proxies were "
                f"chosen in the last {window} batches; use assignment='matched' or 'balanced'",
                stacklevel=2,
            )


class Balanced(Assignment):
    """Each label takes the closest of the least used proxies, once; Z is every other proxy.

    A dynamic choice that can't collapse: Eq. 5 lets every point take its closest proxy, so that a
    few proxies may take all points (docs/dynamic.md). With as many proxies as labels each label has
    its own, as in static assignment; with fewer, labels that are close when they are first seen
    share one, where `Fractional` draws lots. Where labels are missing, items that triplets or pairs
    link are groups, and a group's number is its label: `nofuss.linked_groups`.

    Labels choose in training. Several processes agree: those of all their batches choose together,
    so every process must call the loss in every training step. In evaluation, and under torch.func
    and torch.compile, which change no table, a label that has not chosen has proxy
    `label % num_proxies`, which is even too.
    """

    name = "balanced"
    by_label = True
    proxy_of_label: Tensor

    def __init__(self, num_classes: int, num_proxies: int) -> None:
        super().__init__()
        if num_proxies > num_classes:
            raise ValueError(
                f"balanced assignment has at most one proxy a label, got {num_proxies} for "
                f"{num_classes}; lower proxies_per_class to 1, or use assignment='static'"
            )
        self.num_classes, self.num_proxies = num_classes, num_proxies
        self.register_buffer("proxy_of_label", torch.full((num_classes,), FREE))

    def of(self, x: Tensor, labels: Tensor | None, proxies: Tensor) -> Tensor:
        """Return the label's proxy."""
        labels = required(labels, self.name)
        own = self.proxy_of_label[labels]
        return torch.where(own == FREE, labels % self.num_proxies, own)

    def from_triplets(self, y: Tensor, z: Tensor, proxies: Tensor) -> ProxyTriplets:
        """Refuse: bare embeddings do not say which items were linked before."""
        raise ValueError(
            "got triplets without labels; balanced assignment needs the groups that they link: "
            "pass labels=linked_groups(triplets[:, :2], count).groups, or use assignment='dynamic'"
        )

    def is_settled(self, labels: Tensor) -> bool:
        """Return whether all these labels have chosen; True where values can't be seen.

        Several processes ask for all labels: whether they choose now must not depend on one batch.
        """
        if torch.compiler.is_compiling():
            return True
        proxies = self.proxy_of_label if together() else self.proxy_of_label[labels]
        try:
            return bool((proxies != FREE).all())
        except RuntimeError:  # under torch.vmap
            return True

    @torch.no_grad()
    def settle(self, x: Tensor, labels: Tensor, proxies: Tensor) -> None:
        """Let the labels that have no proxy choose: x (B, D) and proxies as the loss places them.

        Labels are compared by their mean around the mean of all: the embeddings of a network
        with random weights all point nearly the same way, and differ in the rest.
        """
        if together():
            x, labels = torch.cat(rows_of_all(x.detach())), torch.cat(rows_of_all(labels))
        present, group = torch.unique(labels, return_inverse=True)
        sums = x.new_zeros(len(present), x.shape[1]).index_add_(0, group, x - x.mean(0))
        chosen = self.proxy_of_label.clone()
        is_new = chosen[present] == FREE
        distances = squared_distances(normalize(sums[is_new]), normalize(proxies))  # (new, P)
        uses = torch.bincount(chosen[chosen != FREE], minlength=self.num_proxies)
        for label, row in zip(present[is_new], distances, strict=True):
            proxy = row.masked_fill(uses > uses.min(), math.inf).argmin()
            chosen[label] = proxy
            uses[proxy] += 1
        try:
            self.proxy_of_label.copy_(chosen)
        except RuntimeError:  # torch.func refuses to change a tensor from outside
            return

    def fraction_in_use(self) -> float:
        """Return the fraction of proxies that some label holds."""
        held = torch.unique(self.proxy_of_label)
        return float((held != FREE).sum()) / self.num_proxies


NAMES = ("static", "dynamic", "matched", "balanced")
"""What `assignment=` and `--assignment` take."""


def count_proxies(num_classes: int, proxies_per_class: float) -> int:
    """Return the number of all proxies."""
    return max(1, round(num_classes * proxies_per_class))


def kind_of(name: str, num_classes: int, proxies_per_class: float) -> type[Assignment]:
    """Return the class of a name; "static" is fractional below 1 a class, several above."""
    if name not in NAMES:
        raise ValueError(f"unknown assignment {name!r}; choose from {', '.join(map(repr, NAMES))}")
    if name != "static":
        return Balanced if name == "balanced" else Dynamic
    num_proxies = count_proxies(num_classes, proxies_per_class)
    if num_proxies == num_classes:
        return Static
    return Fractional if num_proxies < num_classes else Several


def build_assignment(
    name: str,
    num_classes: int,
    proxies_per_class: float,
    *,
    generator: torch.Generator | None = None,
) -> Assignment:
    """Return the assignment of a name."""
    kind = kind_of(name, num_classes, proxies_per_class)
    num_proxies = count_proxies(num_classes, proxies_per_class)
    if kind is Static:
        return Static(num_classes)
    if kind is Fractional:
        return Fractional(num_classes, num_proxies, generator=generator)
    if kind is Several:
        return Several(num_classes, num_proxies)
    if kind is Balanced:
        return Balanced(num_classes, num_proxies)
    return Dynamic(num_proxies, matched=name == "matched")


def required(labels: Tensor | None, name: str) -> Tensor:
    """Return the labels; ValueError if there are none."""
    if labels is None:
        raise ValueError(f"got no labels; {name} assignment needs them: pass labels")
    return labels


def one_hot(row: Tensor, num_proxies: int) -> Tensor:
    """Return a mask of the row among the proxies, (…) → (…, P)."""
    return row[..., None] == torch.arange(num_proxies).to(row)


def within_batch(positive: Tensor, num_proxies: int) -> ProxyTriplets:
    """Return (x, p(x), the other proxies of the batch) for each x: positive (B,) is p(x)."""
    present = one_hot(positive, num_proxies).any(0)  # (P,)
    anchor = torch.arange(len(positive), device=positive.device)
    return without_empty(positive, present.expand(len(positive), -1), anchor)


def without_empty(positive: Tensor, negative: Tensor, anchor: Tensor) -> ProxyTriplets:
    """Remove p(y) (T,) from p(Z) (T, P), then triplets with no negative left."""
    negative = negative & ~one_hot(positive, negative.shape[1])
    is_useful = negative.any(1)
    return ProxyTriplets(positive[is_useful], negative[is_useful], anchor[is_useful])
