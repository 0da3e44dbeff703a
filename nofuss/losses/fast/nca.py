"""Proxy-NCA over many proxies in chunks, in plain torch.

The plain form holds several (B, P) matrices and the normalised proxies. Here two walks visit the
proxies in chunks that stay in cache: the first sums the exponentials and the gradient by the
embeddings, the second gives the gradient by the proxies. That takes three matrix products and one
exponential a logit, and nothing has size (P, B) except the exponentials, if they are kept.

Logits are laid out (P, B), so that a chunk is contiguous. Sums are pairwise (Z) or blocked within
a chunk, and in double over the chunks: added one after the other in float32, a million equal terms
are 1% off.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nofuss.distributed.processes import all_max, all_sum
from nofuss.distributed.shard import Shard
from nofuss.geometry import normalize
from nofuss.losses.fast.walk import (
    KEEP_BYTES,
    Computed,
    Form,
    Walk,
    reduce,
    return_workspace,
    shares_or_mean,
    take_workspace,
)
from nofuss.losses.of_logits import nca_of_logits
from nofuss.proxies.assignment import ProxyTriplets


class Sums(NamedTuple):
    """What the first walk gives: sums over this process's proxies, relative to exp(top)."""

    z: Tensor
    """(B,) Σ exp(logit − top), in double."""
    dx: Tensor
    """(B, D) Σ exp(logit − top) p̂, in double."""
    top: Tensor
    """(B,) the largest logit; 0 where `bounded` says that no maximum is needed."""
    tops: Tensor | None
    """(chunks, B) the largest logit up to and with each chunk; None where none is needed."""


@dataclass(frozen=True)
class WalkedNCA(Form):
    """log Σ_{p≠p(y)} exp(x·p̂) − x·p̂(y): x (B, D) carries the scale.

    include_positive: False is the paper; True is the softmax form common elsewhere.
    keep: True holds one (P, B) buffer between the walks; False computes it again, a fourth
        matrix product, in O(chunk) memory; None keeps the first 128 MB of it, `KEEP_BYTES`.
    """

    include_positive: bool = False
    keep: bool | None = None

    def plain(self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None) -> Tensor:
        """Return the same loss from one matrix of logits."""
        logits = x @ normalize(proxies).T
        triplets = ProxyTriplets(positive)
        losses = nca_of_logits(logits, triplets, include_positive=self.include_positive)
        return reduce(losses, share)

    def compute(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        shard: Shard | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Walk once for Z and the gradient by x, again for the gradient by the proxies."""
        walk = Walk(x, positive, proxies, shard)
        total = shard.total if shard else len(proxies)
        if total == 1 and not self.include_positive:
            raise ValueError("got one proxy; a positive and a negative need two")
        kept = self._kept(x, proxies) if needs[1] else 0
        block = take_workspace("exponentials", kept * len(x), like=x)
        buffer = block[: kept * len(x)].view(kept, len(x))
        with_maximum = not bounded(x, total)
        sums = walk.first(lambda: self._sum(walk, x, buffer, with_maximum, needs[0]))
        # p̂(y), (B, D): zero where another process holds the positive, so that sums are right.
        p_y = walk.only_here(walk.proxies[walk.row] * walk.inverse[walk.row, None])
        own_logit = (x * p_y).sum(1)
        if shard is not None:
            sums, own_logit = _over_shards(sums, own_logit)
        z, dx, top, _ = sums
        losses = z.log() + top - own_logit  # in double, as Z
        shares = shares_or_mean(share, x)
        loss = (losses @ shares.double()).to(x.dtype)
        if needs[0]:  # ∂/∂x = Σ softmax·p̂ − p̂(y); Σ exp·p̂ is there already
            dx.div_(z[:, None]).sub_(p_y).mul_(shares[:, None])
        dp = self._pull_back(walk, x, p_y, buffer, sums, shares) if needs[1] else None
        return_workspace("exponentials", block)
        return Computed(loss, dx.to(x.dtype) if needs[0] else None, dp)

    def _kept(self, x: Tensor, proxies: Tensor) -> int:
        """Return how many proxies' exponentials are kept for the second walk."""
        if self.keep is not None:
            return len(proxies) if self.keep else 0
        return min(len(proxies), KEEP_BYTES // max(1, len(x) * x.element_size()))

    def _sum(
        self, walk: Walk, x: Tensor, buffer: Tensor, with_maximum: bool, needs_dx: bool
    ) -> Sums:
        """Walk once: Z, Σ exp·p̂, and the first exponentials in `buffer`.

        Kept exponentials are what `weigh_` has made of them, as the second walk needs them.
        """
        kept, num_proxies = len(buffer), len(walk.proxies)
        scratch = x.new_empty(walk.rows if kept < num_proxies else 0, len(x))
        z = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        dx, top = torch.zeros_like(x).double(), x.new_zeros(len(x))
        tops: Tensor | None = None
        if with_maximum:
            top.fill_(torch.finfo(x.dtype).min)
            tops = x.new_empty(len(walk), len(x))
        for i, (chunk, own) in enumerate(walk):
            walk.find_norms(chunk)
            # Written straight into the buffer as long as whole chunks fit in.
            s = walk.logits(chunk, x, out=buffer[chunk] if chunk.stop <= kept else scratch)
            if own and not self.include_positive:
                s[own] = -math.inf
            if tops is not None:
                # A running maximum, as in a streaming log-sum-exp: when it rises from m to m′,
                # what was summed relative to exp(m) is multiplied by exp(m − m′).
                torch.maximum(top, s.amax(0), out=tops[i])
                fade = (top - tops[i]).exp_()
                z.mul_(fade)
                dx.mul_(fade[:, None])
                top = tops[i]
                s.sub_(top)
            z.add_(s.exp_().sum(0))
            if needs_dx or kept:
                m = walk.weigh_(chunk, s)
            if needs_dx:
                walk.add_products_(dx, s, m)
        return Sums(z, dx, top, tops)

    def _pull_back(
        self, walk: Walk, x: Tensor, p_y: Tensor, buffer: Tensor, sums: Sums, share: Tensor
    ) -> Tensor | None:
        """Walk again: the gradient by the proxies, each chunk written straight into its rows."""
        z, _, top, tops = sums
        kept, proxies = len(buffer), walk.proxies
        scratch = x.new_empty(walk.rows if kept < len(proxies) else 0, len(x))
        dp = torch.empty_like(proxies)
        per_z = (share / z).to(x.dtype)
        # share/Z turns exponentials into softmax shares. It belongs to the anchor, so it can
        # multiply x (B, D) instead of the exponentials (chunk, B).
        weighted = x * per_z[:, None]
        for i, (chunk, own) in enumerate(walk):
            if chunk.stop <= kept:
                s = buffer[chunk]
            else:
                s = walk.logits(chunk, x, out=scratch)
                if own and not self.include_positive:
                    s[own] = -math.inf
                if tops is not None:
                    s.sub_(tops[i])
                walk.weigh_(chunk, s.exp_())
            if tops is not None:  # this chunk's exponentials are relative to the maximum so far
                weighted = x * ((tops[i] - top).exp_() * per_z)[:, None]
            walk.pull_back_(chunk, s, weighted, dp)
        walk.pull_back_positives_(x * share[:, None], p_y, dp)
        return walk.unscaled(dp)


def _over_shards(sums: Sums, own_logit: Tensor) -> tuple[Sums, Tensor]:
    """Return the sums over all processes' proxies; dx stays the part of this process."""
    z, dx, top, tops = sums
    if tops is not None:  # every process has its own maximum: bring all to the largest
        own_top, top = top, all_max(top.clone())
        fade = (own_top - top).exp_()
        z.mul_(fade)
        dx.mul_(fade[:, None])
    z, whole_logit = all_sum(torch.stack([z, own_logit.to(z.dtype)]))
    return Sums(z, dx, top, tops), whole_logit


def bounded(x: Tensor, num_proxies: int) -> bool:
    """Return whether Σ exp(x·p̂) can neither overflow nor vanish, so that no maximum is needed.

    |x·p̂| ≤ |x|: while |x| + log P is within the exponents of the type (85 in float32: a scale
    up to 71 over a million proxies) every exponential is a normal number of full precision.
    """
    room = math.log(torch.finfo(x.dtype).max) - 3
    longest = float(torch.linalg.vector_norm(x, dim=1).max())
    return longest + math.log(num_proxies) < room
