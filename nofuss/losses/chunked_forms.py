"""Proxy-NCA, Proxy-Triplet and Proxy-Anchor with their gradients: what `Chunked` computes.

In all of them x (B, D) are directions times the scale, so that a logit is x·p̂. Sums within a chunk
are pairwise or in blocks, and in double over the chunks: added one after the other in float32, a
million equal terms are 1% off.
"""

import math

import torch
from torch import Tensor

from nofuss.geometry import lengths
from nofuss.losses.chunked import KEEP_BYTES, Batch, Computed, Part, Walk, can_sum


def at_once_is_faster(batch: int, num_proxies: int) -> bool:
    """Return whether `nca_at_once` is faster than `nca`: below 6,000 proxies.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    between 4,000 and 8,000 proxies whatever the rest; at 1,000 `nca` takes 1.2 to 2.2 times as
    long. The second condition bounds memory: (B, P) is held twice.
    """
    return num_proxies < 6000 and batch * num_proxies <= 2**22


def nca(batch: Batch, *, scale: float, include_positive: bool = False) -> Computed:
    """Compute log Σ_{p≠p(y)} exp(x·p̂) − x·p̂(y) in two walks with three products.

    The first walk sums the exponentials and the gradient by x, the second gives the gradient by
    the proxies: a cell weighs exp/Z, and Z is known only after all chunks. Exponentials are kept
    for the second walk where `KEEP_BYTES` hold half of them or more, else computed again.
    """
    dtype = batch.x.dtype
    if not can_sum(scale, batch.total, dtype):  # such a scale is rare: twice the time
        batch = batch._replace(x=batch.x.double(), proxies=batch.proxies.double())
    x, proxies, needs, walk = batch.x, batch.proxies, batch.needs, Walk(batch)
    kept = _rows_kept(x, proxies) if needs[1] else 0
    buffer = walk.keep(kept)

    def exponentials(part: Part, chunk: slice, own: tuple[Tensor, Tensor] | None) -> Tensor:
        block = part.kept(chunk)
        s = part.logits(chunk, x, out=part.scratch if block is None else block)
        if own and not include_positive:
            s[own] = -math.inf
        return s.exp_()

    def sum_up(part: Part) -> tuple[Tensor, Tensor]:
        z = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        dx = torch.zeros_like(x).double()
        for chunk, own in part:
            part.find_norms(chunk)
            s = exponentials(part, chunk, own)
            z.add_(s.sum(0))
            if needs[0] or kept:
                m = part.weigh_(chunk, s)
            if needs[0]:
                part.add_products_(dx, s, m)
        return z, dx

    z, dx = walk.total(sum_up)
    p_y = walk.positives()
    own_logit = (x * p_y).sum(1).double()
    z, own_logit = batch.over_shards(torch.stack([z, own_logit]))
    weight = batch.weight
    loss = (z.log() - own_logit) @ weight.double()
    if needs[0]:  # ∂/∂x = Σ softmax·p̂ − p̂(y); Σ exp·p̂ is there already
        dx.div_(z[:, None]).sub_(p_y).mul_(weight[:, None])
    dp = None
    if needs[1]:
        dp = by_proxies = torch.empty_like(proxies)
        # weight/Z turns exponentials into softmax shares. It belongs to the anchor, so it can
        # multiply x (B, D) instead of the exponentials (chunk, B).
        weighted = x * (weight / z).to(x.dtype)[:, None]

        def pull_back(part: Part) -> None:
            for chunk, own in part:
                s = part.kept(chunk)
                if s is None:
                    s = exponentials(part, chunk, own)
                    part.weigh_(chunk, s)
                part.pull_back_(chunk, s, weighted, by_proxies)

        walk.each(pull_back)
        walk.pull_back_positives_(x * weight[:, None], p_y, dp)
        dp = dp.to(dtype)
    batch.work.give("kept", buffer)
    return Computed(loss.to(dtype), dx.to(dtype) if needs[0] else None, dp)


def _rows_kept(x: Tensor, proxies: Tensor) -> int:
    """Return of how many proxies the exponentials are kept: of none if most do not fit."""
    fit = KEEP_BYTES // (len(x) * x.element_size())
    return min(fit, len(proxies)) if 2 * fit >= len(proxies) else 0


def nca_at_once(batch: Batch, *, include_positive: bool = False) -> Computed:
    """`nca` over few proxies, from one (B, P) softmax.

    At a hundred proxies a step is all overhead, a dozen microseconds an operation and twice that
    for its gradient. A gradient written by hand needs a third of autograd's operations.
    """
    x, positive, proxies, shares, shard, needs, _ = batch
    assert shard is None
    norms = lengths(proxies)
    p = proxies / norms
    logits = x @ p.T  # (B, P)
    own = positive.unsqueeze(1)
    own_logits = logits.gather(1, own)
    if not include_positive:
        logits.scatter_(1, own, -math.inf)
    softmax = logits.softmax(1)
    # max softmax = exp(max logit) / Σ exp, so log Σ exp = max logit − log max softmax: softmax has
    # summed the exponentials already.
    losses = logits.amax(1, True).sub_(softmax.amax(1, True).log_()).sub_(own_logits)
    loss = losses.mean() if shares is None else losses.squeeze(1) @ shares
    if not any(needs):
        return Computed(loss, None, None)
    # From here on the derivative by the logits: softmax − 1 at the positive, or −1 alone where
    # the positive is not in the denominator.
    if include_positive:
        softmax.scatter_add_(1, own, softmax.new_full(own.shape, -1))
    else:
        softmax.scatter_(1, own, -1)
    softmax.mul_(1 / len(x) if shares is None else shares.unsqueeze(1))
    dx = softmax @ p if needs[0] else None
    dp = None
    if needs[1]:  # through the norm: only the part across p remains, divided by |p|
        dp = softmax.T @ x
        dp.addcmul_(p, (dp * p).sum(1, keepdim=True), value=-1).div_(norms)
    return Computed(loss, dx, dp)


def triplet(batch: Batch, *, margin: float) -> Computed:
    """Eq. 3 over proxies: the mean over p(z) of [x·p̂(z) − x·p̂(y) + M]₊, in one walk.

    A cell weighs its anchor's share where its hinge is open, so its weight is known at once.
    """
    x, proxies, needs, walk = batch.x, batch.proxies, batch.needs, Walk(batch)
    p_y = walk.positives()  # (B, D)
    lead = margin - batch.over_shards((x * p_y).sum(1))  # M − x·p̂(y)
    weight = batch.weight / (batch.total - 1)
    weighted = x * weight[:, None]
    dp = torch.empty_like(proxies) if needs[1] else None

    def sum_up(part: Part) -> tuple[Tensor, Tensor, Tensor]:
        ones = x.new_ones(part.rows)
        total, dx = torch.zeros_like(lead).double(), torch.zeros_like(x).double()
        opened = torch.zeros_like(lead)
        for chunk, own in part:
            part.find_norms(chunk)
            s = part.logits(chunk, x, out=part.scratch).add_(lead).clamp_min_(0)  # (chunk, B)
            if own:
                s[own] = 0  # the positive is no negative of its anchor
            total += s.sum(0)
            if any(needs):
                # The derivative of a hinge is 1 where it is open: its sign. Counts are whole
                # numbers, exact in float32 up to 2²⁴.
                opened.addmv_(s.sign_().T, ones[: len(s)])
                m = part.weigh_(chunk, s)
            if needs[0]:
                part.add_products_(dx, s, m)
            if dp is not None:
                part.pull_back_(chunk, s, weighted, dp)
        return total, opened, dx

    total, opened, dx = walk.total(sum_up)
    loss = (batch.over_shards(total) @ weight.double()).to(x.dtype)
    if any(needs):
        # The positive is in every hinge: it is pulled once for each that is open.
        opened = batch.over_shards(opened)
        dx.sub_(p_y * opened[:, None]).mul_(weight[:, None])
    if dp is not None:
        walk.pull_back_positives_(x * (opened * weight)[:, None], p_y, dp)
    return Computed(loss, dx.to(x.dtype) if needs[0] else None, dp)


def anchor(batch: Batch, *, margin: float) -> Computed:
    """mean_{p∈P⁺} log(1+Σ_{b∈X⁺} e^{M−x·p̂}) + mean_{p∈P} log(1+Σ_{b∈X⁻} e^{x·p̂+M}), in one walk.

    Kim et al. 2020, Eq. 4; x and M carry the scale. The walk is over the negatives, a row each
    proxy; all positives are only B numbers.
    """
    assert batch.shares is None  # the sums over the batch are inside logarithms
    x, proxies, needs, walk = batch.x, batch.proxies, batch.needs, Walk(batch)
    p_y = walk.positives()  # (B, D)
    pull, pull_weight = _pull(margin - batch.over_shards((x * p_y).sum(1)), batch.positive)
    dp = torch.empty_like(proxies) if needs[1] else None

    def sum_up(part: Part) -> tuple[Tensor, Tensor]:
        push = torch.zeros((), dtype=torch.float64, device=x.device)
        dx = torch.zeros_like(x).double()
        for chunk, own in part:
            part.find_norms(chunk)
            s = part.logits(chunk, x, out=part.scratch).add_(margin)  # (chunk, B)
            if own:
                s[own] = -math.inf
            # log(1 + Σ exp s) as a log-sum-exp: the 1 is exp(0), so 0 counts for the maximum too.
            top = s.amax(1).clamp_min_(0)
            whole = s.sub_(top[:, None]).exp_().sum(1) + (-top).exp()
            push += (whole.log() + top).sum()
            if any(needs):
                # Unlike in Proxy-NCA the normaliser belongs to the proxy: a weight of its row.
                weight = 1 / (whole * batch.total)
                m = part.weigh_(chunk, s, weight)
            if needs[0]:
                part.add_products_(dx, s, m)
            if dp is not None:
                part.pull_back_(chunk, s, x, dp, weight)
        return push, dx

    push, dx = walk.total(sum_up)
    loss = (pull + batch.over_shards(push) / batch.total).to(x.dtype)
    if needs[0]:
        dx.sub_(p_y * pull_weight[:, None])
    if dp is not None:
        walk.pull_back_positives_(x * pull_weight[:, None], p_y, dp)
    return Computed(loss, dx.to(x.dtype) if needs[0] else None, dp)


def _pull(t: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean_{p∈P⁺} log(1 + Σ_{b∈X⁺} exp t_b), and its derivative by t."""
    # Anchors grouped by their positive: P⁺ has B proxies at most, however many there are in all.
    used, of_used = torch.unique(positive, return_inverse=True)
    top = t.new_zeros(len(used)).scatter_reduce_(0, of_used, t, "amax")
    e = (t - top[of_used]).exp()
    whole = (-top).exp().index_add_(0, of_used, e)
    return (whole.log() + top).sum() / len(used), e / (whole[of_used] * len(used))
