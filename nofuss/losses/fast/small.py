"""Proxy-NCA over few proxies: the same arithmetic as the plain form, as one node of the graph.

At a hundred proxies a step is all overhead, a dozen microseconds an operation and twice that for
its gradient. A gradient written by hand needs a third of the operations.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nofuss.distributed.shard import Shard
from nofuss.geometry import are_ordinary, largest_entries, normalize
from nofuss.losses.fast.walk import Computed, Form, reduce
from nofuss.losses.of_logits import nca_of_logits
from nofuss.proxies.assignment import ProxyTriplets


def small_is_faster(batch: int, num_proxies: int) -> bool:
    """Return whether this form is faster than the walk in chunks: below 6,000 proxies.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    between 4,000 and 8,000 proxies whatever the rest; at 1,000 the walk takes 1.2 to 2.2 times as
    long. The second condition bounds memory: (B, P) is held twice.
    """
    return num_proxies < 6000 and batch * num_proxies <= 2**22


@dataclass(frozen=True)
class SmallNCA(Form):
    """log Σ_{p≠p(y)} exp(scale·x̂·p̂) − scale·x̂·p̂(y): x (B, D) of any norm. Holds (B, P) twice."""

    scale: float
    include_positive: bool = False

    def plain(self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None) -> Tensor:
        """Return the same loss from one matrix of logits."""
        logits = self.scale * (normalize(x) @ normalize(proxies).T)
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
        """Compute three products; gradients lose their part along vectors whose norm is free."""
        assert shard is None
        lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        norms = torch.linalg.vector_norm(proxies, dim=1, keepdim=True)
        if not are_ordinary(torch.cat((lengths, norms))):
            return self._compute_rescaled(x, positive, proxies, share, needs)
        return self._compute(x / lengths, lengths, positive, proxies / norms, norms, share, needs)

    def _compute(
        self,
        x: Tensor,
        lengths: Tensor,
        positive: Tensor,
        p: Tensor,
        norms: Tensor,
        share: Tensor | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Compute from directions x (B, D) and p (P, D), and the lengths they had."""
        # beta=0: `lengths` only fills the place of a summand and is never read.
        logits = torch.addmm(lengths, x, p.t(), beta=0, alpha=self.scale)  # (B, P)
        own = positive.unsqueeze(1)
        own_logits = logits.gather(1, own)
        if not self.include_positive:
            logits.scatter_(1, own, -math.inf)
        shares = logits.softmax(1)
        # max share = exp(max logit) / Σ exp, so log Σ exp = max logit − log max share: softmax has
        # summed the exponentials already.
        losses = logits.amax(1, True).sub_(shares.amax(1, True).log_()).sub_(own_logits)
        loss = losses.mean() if share is None else losses.squeeze(1) @ share
        if not any(needs):
            return Computed(loss, None, None)
        # From here on the derivative by the logits: softmax − 1 at the positive, or −1 alone where
        # the positive is not in the denominator.
        if self.include_positive:
            shares.scatter_add_(1, own, shares.new_full(own.shape, -1))
        else:
            shares.scatter_(1, own, -1)
        shares.mul_(self.scale / len(x) if share is None else (self.scale * share).unsqueeze(1))
        dx = dp = None
        if needs[0]:
            dx = torch.mm(shares, p)
            # Through the norm: only the part across x remains, divided by |x|.
            dx.addcmul_(x, (dx * x).sum(1, keepdim=True), value=-1).div_(lengths)
        if needs[1]:
            dp = torch.mm(shares.t(), x)
            dp.addcmul_(p, (dp * p).sum(1, keepdim=True), value=-1).div_(norms)
        return Computed(loss, dx, dp)

    def _compute_rescaled(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Compute from vectors whose norms overflow or vanish as they are, zero among them."""
        pairs = []
        for vectors in (x, proxies):
            top = largest_entries(vectors)
            norms = torch.linalg.vector_norm(vectors / top, dim=1, keepdim=True)
            norms.masked_fill_(norms == 0, 1)
            pairs.append((vectors / top / norms, top, norms))
        (x, x_top, lengths), (p, p_top, norms) = pairs
        loss, dx, dp = self._compute(x, lengths, positive, p, norms, share, needs)
        return Computed(
            loss, dx if dx is None else dx.div_(x_top), dp if dp is None else dp.div_(p_top)
        )
