"""Proxy-Triplet and Proxy-Anchor over many proxies, on the walk of the fused Proxy-NCA.

Proxy-NCA weighs a cell (proxy, anchor) by 1/Z, which is known only after all chunks. Here the
weight depends on the chunk alone, so one walk gives loss and gradients: three matrix products, and
O(chunk) memory beside the gradients themselves. Sums over chunks are in double, as there may be
thousands of them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nofuss.distributed.processes import all_sum
from nofuss.distributed.shard import Shard
from nofuss.geometry import normalize
from nofuss.losses.fast.walk import Computed, Form, Walk, reduce, shares_or_mean
from nofuss.losses.of_logits import anchor_of_cosines, triplet_of_logits
from nofuss.proxies.assignment import ProxyTriplets


@dataclass(frozen=True)
class WalkedTriplet(Form):
    """Eq. 3 over proxies: the mean over p(z) of [x·p̂(z) − x·p̂(y) + M]₊; x carries the scale."""

    margin: float

    def plain(self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None) -> Tensor:
        """Return the same loss from one matrix of logits."""
        logits = x @ normalize(proxies).T
        return reduce(triplet_of_logits(logits, ProxyTriplets(positive), margin=self.margin), share)

    def compute(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        shard: Shard | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Walk once; a cell weighs its anchor's share where its hinge is open, above 0."""
        num_proxies = shard.total if shard else len(proxies)
        if num_proxies == 1:
            raise ValueError("got one proxy; a positive and a negative need two")
        walk = Walk(x, positive, proxies, shard)
        p_y = walk.only_here(normalize(proxies[walk.row]))  # (B, D)
        lead = self.margin - _over_shards((x * p_y).sum(1), shard)  # M − x·p̂(y)
        shares = shares_or_mean(share, x) / (num_proxies - 1)
        total, open_, dx, dp = walk.first(lambda: self._walk(walk, x, lead, shares, needs))
        loss = (_over_shards(total, shard) @ shares.double()).to(x.dtype)
        if any(needs):
            # The positive is in every hinge: it is pulled once for each that is open.
            open_ = _over_shards(open_, shard)
            dx.sub_(p_y * open_[:, None]).mul_(shares[:, None])
        if dp is not None:
            walk.pull_back_positives_(x * (open_ * shares)[:, None], p_y, dp)
        return Computed(loss, dx.to(x.dtype) if needs[0] else None, walk.unscaled(dp))

    def _walk(
        self, walk: Walk, x: Tensor, lead: Tensor, share: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return each anchor's sum over hinges, how many are open, Σ p̂ of those, and ∂/∂proxies."""
        e, ones = x.new_empty(walk.rows, len(x)), x.new_ones(walk.rows)
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        open_, weighted = x.new_zeros(len(x)), x * share[:, None]
        dx = torch.zeros_like(x).double()
        dp = torch.empty_like(walk.proxies) if needs[1] else None
        for chunk, own in walk:
            walk.find_norms(chunk)
            s = walk.logits(chunk, x, out=e).add_(lead).clamp_min_(0)  # (chunk, B)
            if own:
                s[own] = 0  # the positive is no negative of its anchor
            total += s.sum(0)
            if any(needs):
                # The derivative of a hinge is 1 where it is open: its sign. Counts are whole
                # numbers, exact in float32 up to 2²⁴.
                open_.addmv_(s.sign_().T, ones[: len(s)])
                m = walk.weigh_(chunk, s)
                walk.add_products_(dx, s, m)
            if dp is not None:
                walk.pull_back_(chunk, s, weighted, dp)
        return total, open_, dx, dp


@dataclass(frozen=True)
class WalkedAnchor(Form):
    """mean_{p∈P⁺} log(1+Σ_{b∈X⁺} e^{M−x·p̂}) + mean_{p∈P} log(1+Σ_{b∈X⁻} e^{x·p̂+M}).

    Kim et al. 2020, Eq. 4; x and the margin carry the scale. A sum over the batch is inside the
    logarithms, so an anchor has no share.
    """

    margin: float

    def plain(self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None) -> Tensor:
        """Return the same loss from one matrix of logits."""
        assert share is None
        logits = x @ normalize(proxies).T
        return anchor_of_cosines(logits, ProxyTriplets(positive), scale=1.0, margin=self.margin)

    def compute(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        shard: Shard | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Walk once for the negatives, a row each proxy; all positives are only B numbers."""
        assert share is None
        walk = Walk(x, positive, proxies, shard)
        num_proxies = shard.total if shard else len(proxies)
        p_y = walk.only_here(normalize(proxies[walk.row]))  # (B, D)
        pull, inside = _pull(self.margin - _over_shards((x * p_y).sum(1), shard), positive)
        push, dx, dp = walk.first(lambda: self._walk(walk, x, num_proxies, needs))
        loss = (pull + _over_shards(push, shard) / num_proxies).to(x.dtype)
        if needs[0]:
            dx.sub_(p_y * inside[:, None])
        if dp is not None:
            walk.pull_back_positives_(x * inside[:, None], p_y, dp)
        return Computed(loss, dx.to(x.dtype) if needs[0] else None, walk.unscaled(dp))

    def _walk(
        self, walk: Walk, x: Tensor, num_proxies: int, needs: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return Σ log(1 + Σ exp) over this process's proxies, and its gradients / num_proxies."""
        push = torch.zeros((), dtype=torch.float64, device=x.device)
        e, dx = x.new_empty(walk.rows, len(x)), torch.zeros_like(x).double()
        dp = torch.empty_like(walk.proxies) if needs[1] else None
        for chunk, own in walk:
            walk.find_norms(chunk)
            s = walk.logits(chunk, x, out=e).add_(self.margin)  # (chunk, B)
            if own:
                s[own] = -math.inf
            # log(1 + Σ exp s) as a log-sum-exp: the 1 is exp(0), so 0 counts for the maximum too.
            top = s.amax(1).clamp_min_(0)
            exponentials = s.sub_(top[:, None]).exp_().sum(1)
            whole = exponentials + (-top).exp_()
            push += (whole.log() + top).sum()
            if any(needs):
                # Unlike in Proxy-NCA the normaliser belongs to the proxy: a weight of its row.
                weight = 1 / (whole * num_proxies)
                m = walk.weigh_(chunk, s, weight)
                walk.add_products_(dx, s, m)
                if dp is not None:
                    walk.pull_back_(chunk, s, x, dp, weight)
        return push, dx, dp


def _over_shards(part: Tensor, shard: Shard | None) -> Tensor:
    """Return the sum of all processes' parts."""
    return part if shard is None else all_sum(part)


def _pull(t: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean_{p∈P⁺} log(1 + Σ_{b∈X⁺} exp t_b), and its derivative by t."""
    # Anchors grouped by their positive: P⁺ has B proxies at most, however many there are in all.
    used, of_used = torch.unique(positive, return_inverse=True)
    top = t.new_zeros(len(used)).scatter_reduce_(0, of_used, t, "amax")
    e = (t - top[of_used]).exp()
    whole = (-top).exp().index_add_(0, of_used, e)
    return (whole.log() + top).sum() / len(used), e / (whole[of_used] * len(used))
