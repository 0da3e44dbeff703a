"""What the fused losses share: proxies in chunks, their positives, the way through the norm."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 2**18
"""Numbers in a chunk's largest matrix: 1 MB of float32, so that a chunk stays in cache."""


class Walk:
    """The proxies in chunks, each with the cells of its positives: a (P, B) mask never made."""

    def __init__(self, x: Tensor, positive: Tensor, proxies: Tensor) -> None:
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
        self.proxies = proxies
        # Two rows at least, so that every anchor has a negative in the first chunk.
        self.rows = min(len(proxies), max(2, CHUNK // max(x.shape)))
        self.starts = range(0, len(proxies), self.rows)
        self.positive, self.anchor = positive.sort()
        cuts = torch.arange(len(self.starts) + 1, device=positive.device) * self.rows
        self.cuts = torch.searchsorted(self.positive, cuts).tolist()
        if self.cuts[0] > 0 or self.cuts[-1] < len(x) or self.positive[-1] >= len(proxies):
            low, high = int(self.positive[0]), int(self.positive[-1])
            raise ValueError(f"positive spans {low} … {high} but there are {len(proxies)} proxies")

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor] | None]]:
        """Each chunk, and the cells (row in the chunk, anchor) of its positives, if it has any."""
        for i, start in enumerate(self.starts):
            low, high = self.cuts[i : i + 2]
            cells = (self.positive[low:high] - start, self.anchor[low:high]) if high > low else None
            yield slice(start, min(start + self.rows, len(self.proxies))), cells

    def directions(self, chunk: slice, inverse: Tensor, out: Tensor) -> Tensor:
        """p/|p| of a chunk, in the workspace `out`."""
        return torch.mul(self.proxies[chunk], inverse[:, None], out=out[: len(inverse)])


def inverse_norms(p: Tensor, out: Tensor) -> Tensor:
    """1/|p| of each row, bounded as F.normalize does: a zero row stays zero."""
    torch.linalg.vector_norm(p, dim=1, out=out)
    return out.clamp_min_(1e-12).reciprocal_()


def through_norm_(v: Tensor, p: Tensor, factor: Tensor, inverse: Tensor, work: Tensor) -> Tensor:
    """From v = ∂/∂p̂ to ∂/∂p = (v − p̂ (p̂·v)) / |p|, in place; `factor` is 1/|p|, or a multiple."""
    along = torch.mul(v, p, out=work).sum(1).mul_(inverse).mul_(inverse).mul_(factor)
    return v.mul_(factor[:, None]).addcmul_(p, along[:, None], value=-1)
