"""What the fused losses share: proxies in chunks, their positives, and gradients through the norm.

A walk visits the proxies chunk by chunk and never forms a whole (P, B) matrix. Its steps, in the
order in which a loss calls them on each chunk:

    find_norms     1/|p| of the chunk
    logits         s = x·p/|p|, (chunk, B)
    weigh_         prepare s for the two products below
    add_products_  the chunk's part of the gradient by x
    pull_back_     the gradient by the chunk's proxies
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nofuss.distributed.shard import Shard
from nofuss.geometry import are_ordinary, largest_entries

Result = TypeVar("Result")

CHUNK = 2**19
"""Numbers in a chunk's largest matrix: 2 MB of float32, so that a chunk stays in cache."""

SUM_ROWS = 512
"""Proxies in one float32 sum of products. Some matrix products add one term after the other, and
the rounding of equal terms adds up with their number: 7e-5 over 8,192 rows."""

KEEP_BYTES = 2**27
"""How much of a loss's exponentials is kept for its second walk; the rest is computed again."""

_spare: dict[tuple[str, torch.dtype], Tensor] = {}


def take_workspace(use: str, count: int, *, like: Tensor) -> Tensor:
    """Return a block of `count` numbers or more, reusing the last step's if it is large enough.

    Memory fresh from the system costs a CPU as much as a product; torch caches it on GPUs.
    """
    if count == 0 or like.device.type != "cpu":
        return like.new_empty(count)
    # Taken out while in use, so that a second graph alive at the same time gets its own block.
    block = _spare.pop((use, like.dtype), None)
    if block is not None and len(block) < count:
        return_workspace(use, block)
        block = None
    return like.new_empty(count) if block is None else block


def return_workspace(use: str, block: Tensor) -> None:
    """Leave a block to the next step, unless it is larger than what is kept by default."""
    # Autograd refuses tensors that were made in inference mode.
    if block.device.type == "cpu" and 0 < block.nbytes <= KEEP_BYTES and not block.is_inference():
        _spare[use, block.dtype] = block


def release_workspaces() -> None:
    """Free the blocks that were left for the next step."""
    _spare.clear()


class Computed(NamedTuple):
    """A loss and its gradients, computed together; None where a gradient is not needed."""

    loss: Tensor
    by_x: Tensor | None
    by_proxies: Tensor | None


class Form(ABC):
    """A loss L of x (B, D), rows of the proxies `positive` (B,), and proxies (P, D).

    L = Σ_b share_b · loss of x_b, the mean without `share`.
    """

    @abstractmethod
    def compute(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        share: Tensor | None,
        shard: Shard | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Return L and its gradients by x and by the proxies, as far as `needs` asks for them."""

    @abstractmethod
    def plain(self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None) -> Tensor:
        """Return L in operations that autograd can differentiate any number of times."""

    def plain_gradients(
        self, x: Tensor, positive: Tensor, proxies: Tensor, share: Tensor | None, grad: Tensor
    ) -> list[Tensor | None]:
        """Return grad · ∂L by x and by the proxies, with a graph for further derivatives."""
        with torch.enable_grad():
            loss = self.plain(x, positive, proxies, share)
        inputs = [each for each in (x, proxies) if each.requires_grad]
        gradients = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
        return [next(gradients) if each.requires_grad else None for each in (x, proxies)]


def reduce(losses: Tensor, share: Tensor | None) -> Tensor:
    """Return Σ share · losses, or the mean without `share`."""
    return losses.mean() if share is None else losses @ share


def shares_or_mean(share: Tensor | None, x: Tensor) -> Tensor:
    """Return what each anchor counts (B,): its share, or 1/B without `share`."""
    return x.new_full((len(x),), 1 / len(x)) if share is None else share


class Walk:
    """The proxies in chunks, each with the cells (proxy, anchor) of its positives.

    Proxies are normalised on the way, by scaling the smaller matrix: the product (chunk, B)
    where the batch is narrower than the embeddings, else the chunk itself, in a workspace.
    With a shard, the proxies are this process's rows, and `positive` counts among all rows.

    Norms are computed on the way too. Only after the first walk it is known whether all of them
    could be divided by; `first` then repeats it over rescaled proxies where one could not.
    """

    def __init__(
        self, x: Tensor, positive: Tensor, proxies: Tensor, shard: Shard | None = None
    ) -> None:
        if x.ndim != 2 or proxies.ndim != 2 or x.shape[1] != proxies.shape[1]:
            raise ValueError(
                f"embeddings are {tuple(x.shape)} and proxies {tuple(proxies.shape)}; "
                "expected (B, D) and (P, D)"
            )
        if positive.shape != x.shape[:1] or len(x) == 0:
            raise ValueError(
                f"positive is {tuple(positive.shape)} for embeddings {tuple(x.shape)}; "
                "expected a row of the proxies for each, and one at least"
            )
        self.row, self.here = positive, None
        if shard is not None:
            held = shard.holds(positive)
            positive = positive - shard.start
            # Row 0 stands in for a positive that another process holds; `here` makes it count 0.
            self.row, self.here = positive * held, held.to(x)[:, None]
        # Two rows at least, so that every anchor has a negative in the first chunk: a running
        # maximum then starts at a logit.
        self.rows = min(len(proxies), max(2, CHUNK // max(x.shape)))
        if len(proxies) <= 1.5 * self.rows:  # a second, small chunk would cost more than it saves
            self.rows = len(proxies)
        self.starts = range(0, len(proxies), self.rows)
        if shard is None:
            low, high = (int(end) for end in positive.aminmax())
            if low < 0 or high >= len(proxies):
                raise ValueError(
                    f"positive spans {low} … {high} but there are {len(proxies)} proxies"
                )
        if shard is None and len(self.starts) == 1:
            self.positive, self.anchor = positive, torch.arange(len(x), device=x.device)
            self.cuts = [0, len(x)]
        else:  # sorted once, the positives of a chunk are one run: from cuts[i] to cuts[i + 1]
            self.positive, self.anchor = positive.sort()
            cuts = torch.arange(len(self.starts) + 1, device=positive.device) * self.rows
            self.cuts = torch.searchsorted(self.positive, cuts.clamp_(max=len(proxies))).tolist()
        self.proxies = proxies
        self.narrow = len(x) < x.shape[1]
        self.inverse = x.new_empty(len(proxies))  # 1/|p|, filled by the first walk
        self.products = x.new_empty(self.rows // SUM_ROWS, *x.shape)
        self.scale: Tensor | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor] | None]]:
        """Yield each chunk, and the cells (row in the chunk, anchor) of its positives, if any."""
        size = self.rows, self.proxies.shape[1]
        block = take_workspace("directions", math.prod(size), like=self.inverse)
        self.work = block[: math.prod(size)].view(size)
        for i, start in enumerate(self.starts):
            low, high = self.cuts[i : i + 2]
            cells = (self.positive[low:high] - start, self.anchor[low:high]) if high > low else None
            yield slice(start, min(start + self.rows, len(self.proxies))), cells
        return_workspace("directions", block)

    def first(self, walk_once: Callable[[], Result]) -> Result:
        """Return what the first walk gives, repeated if a norm has overflowed or vanished."""
        result = walk_once()
        if not are_ordinary(self.inverse):
            # Divided by its largest entry, no proxy has a norm that leaves the type.
            self.scale = largest_entries(self.proxies)
            self.proxies = self.proxies / self.scale
            result = walk_once()
        return result

    def only_here(self, x: Tensor) -> Tensor:
        """Return x (B, D) with zeros for anchors whose positive another process holds."""
        return x if self.here is None else x * self.here

    def unscaled(self, dp: Tensor | None) -> Tensor | None:
        """Return the gradient by the proxies as they were before `first` rescaled them."""
        return dp if dp is None or self.scale is None else dp.div_(self.scale)

    def find_norms(self, chunk: slice) -> None:
        """Compute 1/|p| of the chunk; a row of zeros stays as it is, as in `normalize`."""
        r = self.inverse[chunk]
        torch.linalg.vector_norm(self.proxies[chunk], dim=1, out=r)
        if self.scale is not None:  # without rescaling, 1/0 tells `first` to walk again
            r.masked_fill_(r == 0, 1)
        r.reciprocal_()

    def logits(self, chunk: slice, x: Tensor, out: Tensor) -> Tensor:
        """Return x·p/|p|, (chunk, B), in `out`."""
        p, r = self.proxies[chunk], self.inverse[chunk][:, None]
        if self.narrow:
            return torch.mm(p, x.T, out=out[: len(p)]).mul_(r)
        directions = torch.mul(p, r, out=self.work[: len(p)])
        return torch.mm(directions, x.T, out=out[: len(p)])

    def weigh_(self, chunk: slice, s: Tensor, weight: Tensor | None = None) -> Tensor:
        """After `logits`: prepare s, and return m, so that sᵀm = Σ_p weight_p s_p p/|p|."""
        p, r = self.proxies[chunk], self.inverse[chunk]
        if self.narrow:
            s.mul_((r if weight is None else r * weight)[:, None])
            return p
        directions = self.work[: len(p)]  # as `logits` has left them
        return directions if weight is None else directions.mul_(weight[:, None])

    def add_products_(self, total: Tensor, s: Tensor, m: Tensor) -> None:
        """After `weigh_`: add sᵀm to `total` (B, D), which is in double."""
        # Blocks of `SUM_ROWS` proxies in float32, their sums in double: see `SUM_ROWS`.
        blocks = len(s) // SUM_ROWS
        whole = blocks * SUM_ROWS
        if blocks:
            products = torch.bmm(
                s[:whole].view(blocks, SUM_ROWS, -1).transpose(1, 2),
                m[:whole].view(blocks, SUM_ROWS, -1),
                out=self.products[:blocks],
            )
            total.add_(products.sum(0))
        if whole < len(s):
            total.add_(s[whole:].T @ m[whole:])

    def pull_back_(
        self, chunk: slice, s: Tensor, x: Tensor, dp: Tensor, weight: Tensor | None = None
    ) -> None:
        """After `weigh_`: write Σ_b weight_p s_pb ∂(x_b·p/|p|)/∂p of the chunk into `dp`."""
        p, r = self.proxies[chunk], self.inverse[chunk]
        v = torch.mm(s, x, out=dp[chunk])
        if not self.narrow:  # else `weigh_` has put 1/|p| and the weight into s
            v.mul_((r if weight is None else r * weight)[:, None])
        # A direction does not change when p grows, so its gradient is perpendicular to p.
        along = torch.mul(v, p, out=self.work[: len(p)]).sum(1).mul_(r).mul_(r)
        v.addcmul_(p, along[:, None], value=-1)

    def pull_back_positives_(self, x: Tensor, p_y: Tensor, dp: Tensor) -> None:
        """Subtract each x_b, pulled back through the norm, from the row of its positive in `dp`.

        p_y: (B, D) the directions of the positives, zero for those that another process holds.
        """
        v = self.only_here(x) * self.inverse[self.row, None]
        v.addcmul_(p_y, (v * p_y).sum(1, keepdim=True), value=-1)
        dp.index_add_(0, self.row, v, alpha=-1)
