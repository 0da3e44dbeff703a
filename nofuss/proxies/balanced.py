"""Balanced assignment: a dynamic choice that can't collapse.

Eq. 5 lets every point take its closest proxy, so that a few proxies may take all points; see
docs/dynamic.md. Here labels choose, not points, and evenly: a label takes the closest of the
proxies that the fewest labels hold, when it is first seen, and keeps it. Every proxy is used, and
what belongs together never changes sides. Where labels are missing, items that triplets or pairs
link are groups, and a group's number is its label: `nofuss.linked_groups`.
"""

import math

import torch
from torch import Tensor

from nofuss.distributed.processes import rows_of_all, together
from nofuss.geometry import normalize, squared_distances
from nofuss.proxies.assignment import Assignment, ProxyTriplets, required

FREE = -1
"""The proxy of a label that has not chosen yet."""


class Balanced(Assignment):
    """Each label takes the closest of the least used proxies, once; Z is every other proxy.

    With as many proxies as labels each label has its own, as in static assignment; with fewer,
    labels that are close when they are first seen share one, where `Fractional` draws lots.

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

    def share_in_use(self) -> float:
        """Return the share of proxies that some label holds."""
        held = torch.unique(self.proxy_of_label)
        return float((held != FREE).sum()) / self.num_proxies
