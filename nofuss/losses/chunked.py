"""Losses over many proxies, chunk by chunk, as one node of the graph.

The plain form of a loss holds several (B, P) matrices, which autograd keeps. A chunked form visits
the proxies in chunks that stay in cache and computes the gradients together with the loss, in
O(chunk) memory a thread beside the gradients themselves. `Chunked` binds such a form (a function of
chunked_forms.py) to the plain one: values and first derivatives come from the chunks; second
derivatives, `torch.func`'s vmap and forward mode come from the plain form.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nofuss.distributed.processes import all_sum
from nofuss.distributed.shard import Shard
from nofuss.distributed.threads import blocks, map_in_threads, they_sleep
from nofuss.geometry import ZERO, lengths

CHUNK = 2**19
"""Numbers in a chunk's largest matrix: 2 MB of float32, so that a chunk stays in cache."""

LEAST = 256
"""Proxies from which on a thread more saves more than it costs."""

SUM_ROWS = 512
"""Proxies in one float32 sum of products. Some matrix products add one term after the other, and
the rounding of equal terms adds up with their number: 7e-5 over 8,192 rows."""

KEEP_BYTES = 2**27
"""How much of a loss's exponentials may be kept for its second walk."""


def pays(batch: int, num_proxies: int, dim: int) -> bool:
    """Return whether chunks are faster than the plain form: from 500 proxies and 2¹⁷ numbers on.

    Measured, forward + backward, for batches of 8 to 512 in 64 and 512 dimensions: the two meet
    near 2,000 proxies for (8, 64), 1,000 for (32, 64), 400 for (32, 512) and (512, 64). Chunks
    take twice the plain form's time at 100 proxies (1 ms) and a third at 10,000.
    """
    return num_proxies >= 500 and (batch + dim) * num_proxies >= 2**17


def can_sum(scale: float, num_proxies: int, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether Σ exp(x·p̂) can neither overflow nor vanish, so that no maximum is needed.

    |x·p̂| ≤ scale: while scale + log P is within the exponents of the type (85 in float32: a scale
    up to 71 over a million proxies) every exponential is a normal number of full precision.
    """
    return scale + math.log(num_proxies) < math.log(torch.finfo(dtype).max) - 3


class Workspace:
    """Blocks of memory that one step leaves to the next; a criterion owns one.

    Memory fresh from the system costs a CPU as much as a matrix product; torch caches it on GPUs.
    A copy of a workspace is empty, and it is no part of a state_dict.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.dtype], Tensor] = {}

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()

    def take(self, use: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return an uninitialised block (rows, columns), from the last step's if that is enough."""
        count = rows * columns
        if not count:
            return like.new_empty(rows, columns)
        # Taken out while in use: a second graph alive at the same time gets its own block.
        block = self._blocks.pop((use, like.dtype), None)
        if block is None or len(block) < count or block.device != like.device:
            block = like.new_empty(count)
        return block[:count].view(rows, columns)

    def give(self, use: str, block: Tensor) -> None:
        """Leave a block to the next step."""
        # Autograd refuses tensors that were made in inference mode.
        if block.device.type == "cpu" and block.numel() and not block.is_inference():
            whole = block.new_empty(0).set_(block.untyped_storage())
            self._blocks[use, block.dtype] = whole


class Computed(NamedTuple):
    """A loss and its gradients by x and by the proxies; None where one is not needed."""

    loss: Tensor
    dx: Tensor | None
    dp: Tensor | None


class Batch(NamedTuple):
    """What a chunked form computes: L = Σ_b share_b · loss of x_b, and the gradients it `needs`."""

    x: Tensor
    """(B, D) directions times the scale."""
    positive: Tensor
    """(B,) rows of their proxies."""
    proxies: Tensor
    """(P, D), or with a shard this process's rows; dx is then its part of the gradient."""
    shares: Tensor | None
    """(B,), None for the mean."""
    shard: Shard | None
    needs: tuple[bool, bool]
    work: Workspace

    @property
    def weight(self) -> Tensor:
        """What each anchor counts, (B,): its share, or 1/B."""
        if self.shares is None:
            return self.x.new_full((len(self.x),), 1 / len(self.x))
        return self.shares.to(self.x.dtype)

    @property
    def total(self) -> int:
        """The number of proxies of all processes."""
        return self.shard.total if self.shard else len(self.proxies)

    def over_shards(self, part: Tensor) -> Tensor:
        """Return the sum of all processes' parts."""
        return all_sum(part) if self.shard else part


Form = Callable[[Batch], Computed]
Plain = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The same loss of embeddings (not yet directions), positive, proxies and shares, by autograd."""


@dataclass(frozen=True, eq=False)
class Chunked:
    """A loss by a chunked form, with the derivatives of the plain one."""

    form: Form
    plain: Plain
    scale: float
    shard: Shard | None
    """Which rows the proxies are, where each process holds some."""
    work: Workspace

    def __call__(
        self, x: Tensor, positive: Tensor, proxies: Tensor, shares: Tensor | None = None
    ) -> Tensor:
        """Return the loss of embeddings x (B, D) with positives (B,) among the proxies (P, D).

        shares: (B,) what each anchor counts, instead of 1/B; without a gradient of its own.
        """
        loss: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            self, x, positive, proxies, shares, torch.is_grad_enabled()
        )[0]
        return loss

    def compute(
        self,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        shares: Tensor | None,
        needs: tuple[bool, bool],
    ) -> Computed:
        """Compute from embeddings; only the part of dx across x passes through its norm."""
        length = lengths(x)
        unit = x / length
        loss, dx, dp = self.form(
            Batch(unit * self.scale, positive, proxies, shares, self.shard, needs, self.work)
        )
        if dx is not None:
            along = (dx * unit).sum(1, keepdim=True)
            dx = dx.addcmul(unit, along, value=-1).mul_(self.scale).div_(length)
        return Computed(loss, dx, dp)

    @property
    def differentiable(self) -> Plain:
        """The plain form, whose operations autograd and torch.func know."""
        if self.shard is not None:
            raise RuntimeError(
                "a sharded loss can't be differentiated twice or by torch.func; compute it in one "
                "process"
            )
        return self.plain


class ChunkedLoss(torch.autograd.Function):
    """A loss whose gradients are computed together with it; `backward` only returns them."""

    @staticmethod
    def forward(
        loss: Chunked,
        x: Tensor,
        positive: Tensor,
        proxies: Tensor,
        shares: Tensor | None,
        with_gradients: bool,
    ) -> Computed:
        """Return the loss and its gradients, which only `setup_context` sees."""
        needs = with_gradients and x.requires_grad, with_gradients and proxies.requires_grad
        # Forward mode is off here, but not in the threads that `compute` starts.
        x, proxies = (
            forward_ad.unpack_dual(each).primal  # type: ignore[no-untyped-call]
            for each in (x, proxies)
        )
        return loss.compute(x, positive, proxies, shares, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the gradients, and what a second derivative needs."""
        ctx.loss, *tensors, _ = inputs
        _, *gradients = output
        ctx.mark_non_differentiable(*(each for each in gradients if each is not None))
        # Else backward gets zeros (P, D): a pass over fresh memory.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.gradients = gradients

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients, and drop them: autograd copies one that is still referenced."""
        if grad is None:  # the loss does not depend on what is differentiated
            return (None,) * 6
        x, positive, proxies, shares = ctx.saved_tensors
        loss: Chunked = ctx.loss
        if torch.is_grad_enabled():  # create_graph=True, or torch.func
            plain = loss.differentiable
            of_both = torch.func.vjp(lambda x, p: plain(x, positive, p, shares), x, proxies)
            pull_back: Any = of_both[1]
            dx, dp = pull_back(grad)
            return None, dx, None, dp, None, None
        needs = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        (dx, dp), ctx.gradients = ctx.gradients, (None, None)
        if (needs[0] and dx is None) or (needs[1] and dp is None):  # a second backward
            dx, dp = loss.compute(x, positive, proxies, shares, needs)[1:]
        if loss.shard is not None and dx is not None:
            dx = all_sum(dx)  # each process has the part of its proxies
        try:
            factor = grad.item()
        except RuntimeError:  # is_grads_batched=True: several gradients in one
            dx, dp = (each if each is None else each * grad for each in (dx, dp))
        else:
            if factor != 1:  # a plain backward() saves a pass over the proxies
                dx, dp = (each if each is None else each.mul_(factor) for each in (dx, dp))
        return None, dx, None, dp, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], loss: Chunked, *inputs: Any
    ) -> tuple[tuple[Tensor, None, None], tuple[int, None, None]]:
        """Return the plain form's losses, whose operations torch.vmap knows."""
        losses = torch.vmap(loss.differentiable, in_dims[1:5])(*inputs[:4])
        return (losses, None, None), (0, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None, None]:
        """Return the plain form's derivative along the tangents: its gradients times them."""
        plain: Plain = ctx.loss.differentiable
        x, positive, proxies, shares = ctx.saved_for_forward
        inputs = [x, proxies] if shares is None else [x, proxies, shares]

        def loss(x: Tensor, p: Tensor, shares: Tensor | None = None) -> Tensor:
            return plain(x, positive, p, shares)

        # torch.func.jvp would be a forward mode within a forward mode, which torch does not have.
        gradients = torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
        along = tangents[1], tangents[3], tangents[4]
        pairs = zip(gradients, along, strict=False)
        parts = [(gradient * tangent).sum() for gradient, tangent in pairs if tangent is not None]
        return torch.stack(parts).sum(), None, None


class Walk:
    """The proxies, which each thread visits a part of, in chunks: see `Part`.

    With a shard, the proxies are this process's rows, and `positive` counts among all rows.
    """

    def __init__(self, batch: Batch) -> None:
        x, positive, proxies, shard = batch.x, batch.positive, batch.proxies, batch.shard
        self.proxies, self.work, self.shape = proxies, batch.work, x.shape
        self.row, self.here = positive, None
        if shard is not None:
            held = shard.holds(positive)
            positive = positive - shard.start
            # Row 0 stands in for a positive that another process holds; `here` makes it count 0.
            self.row, self.here = positive * held, held.to(x)[:, None]
        self.sorted, self.anchor = positive.sort()  # so that those of a chunk are neighbours
        self.inverse = x.new_empty(len(proxies))  # 1/|p|, filled by the first walk
        # Torch's own threads, where they spin between operations, would take ours their cores.
        threads = torch.get_num_threads() if x.device.type == "cpu" and they_sleep() else 1
        each = max(LEAST, -(-len(proxies) // threads))
        self.parts = [Part(self, rows) for rows in blocks(0, len(proxies), each)]

    def keep(self, rows: int) -> Tensor:
        """Return a block for the numbers of so many proxies, of which each part has its share."""
        buffer = self.work.take("kept", rows, self.shape[0], like=self.inverse)
        for part in self.parts:
            low, high = (i * rows // len(self.proxies) for i in (part.start, part.stop))
            part.buffer = buffer[low:high]
        return buffer

    def total(self, work: Callable[["Part"], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the sums of what `work` returns of each part."""
        found = map_in_threads(work, self.parts)
        return tuple(sum(each[1:], each[0]) for each in zip(*found, strict=True))

    def each(self, work: Callable[["Part"], None]) -> None:
        """Do `work` on each part."""
        map_in_threads(work, self.parts)

    def positives(self) -> Tensor:
        """Return p̂(y), (B, D): zero for anchors whose positive another process holds."""
        p = self.proxies[self.row]
        return self._only_here(p / lengths(p))

    def _only_here(self, x: Tensor) -> Tensor:
        return x if self.here is None else x * self.here

    def pull_back_positives_(self, x: Tensor, p_y: Tensor, dp: Tensor) -> None:
        """Subtract each x_b, pulled back through the norm, from the row of its positive in `dp`."""
        v = self._only_here(x) * self.inverse[self.row, None]
        v.addcmul_(p_y, (v * p_y).sum(1, keepdim=True), value=-1)
        dp.index_add_(0, self.row, v, alpha=-1)


class Part:
    """Neighbouring proxies in chunks, each with the cells (proxy, anchor) of its positives.

    A form calls, on each chunk:

        find_norms     1/|p| of the chunk, in its first walk
        logits         s = x·p/|p|, (chunk, B)
        weigh_         prepare s for the two products below
        add_products_  the chunk's part of the gradient by x
        pull_back_     the gradient by the chunk's proxies

    Logits are laid out (P, B), so that a chunk is contiguous. Proxies are normalised on the way, by
    scaling the smaller matrix: the product (chunk, B) where the batch is narrower than the
    embeddings, else the chunk itself, in a workspace.
    """

    def __init__(self, walk: Walk, rows: slice) -> None:
        self.start, self.stop, self.shape, self.work = rows.start, rows.stop, walk.shape, walk.work
        self.proxies, self.inverse = walk.proxies, walk.inverse
        count = rows.stop - rows.start
        self.rows = -(-count // max(1, round(count * max(walk.shape) / CHUNK)))
        self.chunks: list[tuple[slice, tuple[Tensor, Tensor] | None]] = []
        chunks = [*blocks(rows.start, rows.stop, self.rows)]
        edges = torch.tensor([rows.start, *(chunk.stop for chunk in chunks)])
        cuts = torch.searchsorted(walk.sorted, edges.to(walk.sorted.device)).tolist()
        for chunk, (low, high) in zip(chunks, pairwise(cuts), strict=True):
            own = walk.sorted[low:high] - chunk.start, walk.anchor[low:high]
            self.chunks.append((chunk, own if high > low else None))
        batch, dim = walk.shape
        self.narrow = batch < dim
        self.buffer = walk.inverse.new_empty(0, batch)
        self.products = walk.inverse.new_empty(self.rows // SUM_ROWS, batch, dim)

    def __iter__(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor] | None]]:
        """Yield each chunk, and the cells (row in the chunk, anchor) of its positives, if any."""
        use = f"directions from {self.start}"
        self.directions = self.work.take(use, self.rows, self.shape[1], like=self.inverse)
        yield from self.chunks
        self.work.give(use, self.directions)

    def kept(self, chunk: slice) -> Tensor | None:
        """Return the chunk's rows of what is kept; None where they do not all fit in."""
        low, high = chunk.start - self.start, chunk.stop - self.start
        return self.buffer[low:high] if high <= len(self.buffer) else None

    @cached_property
    def scratch(self) -> Tensor:
        """A block for the logits of a chunk, (rows, B)."""
        return self.inverse.new_empty(self.rows, self.shape[0])

    def find_norms(self, chunk: slice) -> None:
        """Compute 1/|p| of the chunk, as `lengths` has it."""
        r = torch.linalg.vector_norm(self.proxies[chunk], dim=1, out=self.inverse[chunk])
        r.masked_fill_(r < ZERO, 1).masked_fill_(r == torch.inf, torch.nan).reciprocal_()

    def logits(self, chunk: slice, x: Tensor, out: Tensor) -> Tensor:
        """Return x·p/|p|, (chunk, B), in `out`."""
        p, r = self.proxies[chunk], self.inverse[chunk][:, None]
        if self.narrow:
            return torch.mm(p, x.T, out=out[: len(p)]).mul_(r)
        directions = torch.mul(p, r, out=self.directions[: len(p)])
        return torch.mm(directions, x.T, out=out[: len(p)])

    def weigh_(self, chunk: slice, s: Tensor, weight: Tensor | None = None) -> Tensor:
        """After `logits`: prepare s, and return m, so that sᵀm = Σ_p weight_p s_p p/|p|."""
        p, r = self.proxies[chunk], self.inverse[chunk]
        if self.narrow:
            s.mul_((r if weight is None else r * weight)[:, None])
            return p
        directions = self.directions[: len(p)]  # as `logits` has left them
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
        along = torch.mul(v, p, out=self.directions[: len(p)]).sum(1).mul_(r).mul_(r)
        v.addcmul_(p, along[:, None], value=-1)
