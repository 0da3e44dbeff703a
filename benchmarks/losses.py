"""Losses over proxies, forward + backward, and the step over a million proxies, against peers.

The limit of a loss is its arithmetic: the three matrix products x·Pᵀ, dX, dP, into allocated
memory. The limit of a whole step adds one pass over the proxies and the optimizer's state. Main
cases are run twice, the second time in a process whose allocator keeps freed memory.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import inf, nan

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from benchmarks.timing import Growth, Row, extra_mb, interleaved, keep_memory, optional
from nofuss.losses.proxy_anchor import ProxyAnchor
from nofuss.losses.proxy_nca import ProxyNCA
from nofuss.losses.proxy_triplet import ProxyTriplet

Work = Callable[[], object]
Loss = Callable[[Tensor, Tensor], Tensor]
SCALE = 18.0
LIMIT = "limit: three bare products"
OURS = "nofuss"
PML = "PML ProxyNCALoss"
# (B, D, C): the most that ours may take, as multiples of the limit and of PML's time.
BARS = {
    (512, 64, 100_000): (1.6, 1 / 5),
    (512, 512, 100_000): (1.6, 1 / 2.3),
    (32, 64, 11_318): (2.5, 1 / 2.3),
}
QUICK_CASES = {(512, 64, 20_000): (1.6, 1 / 5), (32, 64, 11_318): (2.5, 1 / 2.5)}
MILLION = (512, 64, 1_000_000)


class Sizes:
    """Embeddings, labels and initial proxies of one case."""

    def __init__(self, batch: int, dim: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batch, dim, generator=generator).requires_grad_()
        self.y = torch.randint(classes, (batch,), generator=generator)
        self.proxies = nn.Parameter(torch.randn(classes, dim, generator=generator))
        self.classes, self.dim = classes, dim

    def both_ways(self, loss: Loss, proxies: nn.Parameter) -> Work:
        """Run forward and backward, and drop the gradients."""

        def work() -> None:
            loss(self.x, self.y).backward()  # type: ignore[no-untyped-call]
            self.x.grad = proxies.grad = None

        return work

    def of_module(self, criterion: nn.Module) -> Work:
        """Return a call of a criterion with the proxies of all others, equally warm in cache."""
        criterion.proxies = self.proxies
        return self.both_ways(criterion, self.proxies)

    def bare_products(self) -> Work:
        """Compute the three products that every exact loss needs."""
        x, p = self.x.detach(), self.proxies.detach()
        s, dx, dp = torch.empty(len(p), len(x)), torch.empty_like(x), torch.empty_like(p)

        def work() -> None:
            torch.mm(p, x.T, out=s)
            torch.mm(s.T, p, out=dx)
            torch.mm(s, x, out=dp)

        return work


class CosineCrossEntropy(nn.Module):
    """The loss as one writes it without a library."""

    proxies: nn.Parameter

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Softmax over cosines."""
        return F.cross_entropy(SCALE * F.normalize(x) @ F.normalize(self.proxies).T, y)


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure Proxy-NCA at the sizes of the bars, related losses, optimizers, whole steps."""
    cases = QUICK_CASES if quick else BARS
    for (batch, dim, classes), (times, part) in cases.items():
        sizes = Sizes(batch, dim, classes)
        works = _nca(sizes)
        seconds = interleaved(works, repeats=_repeats(classes))
        times = min(times, part * seconds.get(PML, inf) / seconds[LIMIT])
        yield from _rows(_case(sizes), works, seconds, bar=times)
    sizes = Sizes(32, 64, 100)
    works = _nca(sizes, small=True)
    seconds = interleaved(works, repeats=200, warmups=20)
    fastest = min(t for name, t in seconds.items() if name not in (OURS, LIMIT))
    yield from _rows(_case(sizes), works, seconds, bar=1.05 * fastest / seconds[LIMIT])
    yield from _relatives(Sizes(*((32, 64, 11_318) if quick else (512, 64, 100_000))))
    yield from _memory_kept(quick)
    classes = 100_000 if quick else MILLION[2]
    yield from _optimizers(classes)
    yield from _steps(Sizes(*MILLION[:2], classes))


def growth(*, quick: bool) -> Iterator[Growth]:
    """Measure seconds against C, B and D, one varied at a time."""
    top = 32_000 if quick else 256_000
    classes = [c for c in (250, 1_000, 4_000, 16_000, 64_000, 256_000) if c <= top]
    batches = [8, 32, 128, 512] if quick else [8, 32, 128, 512, 2_048]
    dims = [16, 64, 256] if quick else [16, 64, 256, 1_024]
    middle = 8_000 if quick else 16_000
    yield _grow("loss-classes", "B 128, D 64", "classes C", [(128, 64, c) for c in classes], 2)
    yield _grow(
        "loss-batch", f"D 64, C {middle:,}", "batch B", [(b, 64, middle) for b in batches], 0
    )
    yield _grow(
        "loss-dim", f"B 128, C {middle:,}", "dimensions D", [(128, d, middle) for d in dims], 1
    )


def _grow(
    name: str, fixed: str, axis: str, cases: list[tuple[int, int, int]], varied: int
) -> Growth:
    curves: dict[str, list[float]] = {}
    for case in cases:
        works = _nca(Sizes(*case), small=True)
        works["three bare products"] = works.pop(LIMIT)
        for method, seconds in interleaved(works, repeats=3).items():
            curves.setdefault(method, []).append(seconds)
    title = f"Proxy-NCA, forward + backward, {fixed}"
    sizes = tuple(case[varied] for case in cases)
    return Growth(name, title, axis, sizes, {m: tuple(v) for m, v in curves.items()})


def _nca(sizes: Sizes, *, small: bool = False) -> dict[str, Work]:
    """Measure Proxy-NCA in every form; small cases and figures skip some of ours."""
    works: dict[str, Work] = {
        LIMIT: sizes.bare_products(),
        OURS: sizes.of_module(ProxyNCA(sizes.classes, sizes.dim, scale=SCALE)),
    }
    if not small:
        plain = ProxyNCA(sizes.classes, sizes.dim, scale=SCALE, fused=False)
        works["nofuss, plain form"] = sizes.of_module(plain)
    works["cross entropy of cosines"] = sizes.of_module(CosineCrossEntropy())
    if pml := optional("pytorch_metric_learning.losses"):
        works[PML] = sizes.of_module(
            pml.ProxyNCALoss(sizes.classes, sizes.dim, softmax_scale=SCALE)
        )
    return works


def _relatives(sizes: Sizes) -> Iterator[Row]:
    """Measure Proxy-Anchor and Proxy-Triplet, computed in the same blocks."""
    works: dict[str, Work] = {
        LIMIT: sizes.bare_products(),
        "nofuss": sizes.of_module(ProxyAnchor(sizes.classes, sizes.dim)),
        "nofuss, plain form": sizes.of_module(ProxyAnchor(sizes.classes, sizes.dim, fused=False)),
    }
    if pml := optional("pytorch_metric_learning.losses"):
        works["PML ProxyAnchorLoss"] = sizes.of_module(
            pml.ProxyAnchorLoss(sizes.classes, sizes.dim)
        )
    yield from _rows(f"Proxy-Anchor, {_case(sizes)}", works, interleaved(works, repeats=3))
    works = {
        LIMIT: sizes.bare_products(),
        "nofuss": sizes.of_module(ProxyTriplet(sizes.classes, sizes.dim)),
        "nofuss, plain form": sizes.of_module(ProxyTriplet(sizes.classes, sizes.dim, fused=False)),
    }
    yield from _rows(f"Proxy-Triplet, {_case(sizes)}", works, interleaved(works, repeats=3))


def _optimizers(classes: int) -> Iterator[Row]:
    """Measure one step over dense gradients of all proxies, against one copy of the proxies."""
    p = nn.Parameter(torch.randn(classes, 64))
    p.grad = torch.randn(classes, 64)
    source, target = p.detach(), torch.empty(classes, 64)
    works: dict[str, Work] = {
        "limit: one copy of P": lambda: target.copy_(source),
        "Adam, fused": Adam([p], fused=True).step,
        "AdamW, fused": AdamW([p], fused=True).step,
        "SGD with momentum, fused": SGD([p], momentum=0.9, fused=True).step,
        "RMSprop": RMSprop([p]).step,
        "Adam, default": Adam([p]).step,
    }
    seconds = interleaved(works, repeats=5)
    yield from _rows(f"Optimizer, {classes:,} × 64", works, seconds, bar=3.0)


def _steps(sizes: Sizes) -> Iterator[Row]:
    """Measure loss and update of all proxies."""
    p, m, v = sizes.proxies, torch.zeros_like(sizes.proxies), torch.zeros_like(sizes.proxies)
    products = sizes.bare_products()

    def limit() -> None:
        products()
        for state in (p.detach(), m, v):
            state.mul_(1.0)

    criterion = ProxyNCA(sizes.classes, sizes.dim, scale=SCALE)
    criterion.proxies = p

    def step(optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Work:
        update = optimizer([p])

        def work() -> None:
            criterion(sizes.x, sizes.y).backward()
            update.step()
            sizes.x.grad = p.grad = None

        return work

    works: dict[str, Work] = {
        "limit: three bare products, one pass over P and its state": limit,
        "nofuss, Adam": step(lambda p: Adam(p, fused=True)),
        "nofuss, RMSprop": step(lambda p: RMSprop(p)),
    }
    seconds = interleaved(works, repeats=3)
    yield from _rows(f"Whole step, {_case(sizes)}", works, seconds, bar=2.0)


def _repeats(classes: int) -> int:
    """Return how often to measure for a stable median: more for calls of milliseconds."""
    return 9 if classes > 50_000 else 99


def _case(sizes: Sizes) -> str:
    return f"B {len(sizes.x)}, D {sizes.dim}, C {sizes.classes:,}"


def _rows(
    case: str,
    works: dict[str, Work],
    seconds: dict[str, float],
    *,
    bar: float = nan,
    memory: bool = True,
) -> Iterator[Row]:
    """Return the rows of one case: the limit first, then ours, which has the bar."""
    limit, ours, *_ = works
    extra = {name: extra_mb(work) if memory else nan for name, work in works.items()}
    for name in works:
        note = ""
        if name == ours and PML in works:
            note = f"{seconds[PML] / seconds[ours]:.1f} times PML's speed"
            note += f", {extra[ours] / extra[PML]:.2f} of its memory" if memory else ""
        allowed = bar if name == ours else nan
        yield Row("losses", case, name, seconds[name], seconds[limit], extra[name], note, allowed)


def _memory_kept(quick: bool) -> Iterator[Row]:
    """Measure the main cases in another process, whose malloc reuses freed blocks."""
    command = [sys.executable, "-m", "benchmarks.losses", *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield Row(**json.loads(line))


def main() -> None:
    """Print the main cases as JSON lines, with an allocator that keeps its memory."""
    keep_memory()
    for case in QUICK_CASES if "--quick" in sys.argv else BARS:
        sizes = Sizes(*case)
        works = _nca(sizes)
        seconds = interleaved(works, repeats=_repeats(sizes.classes))
        for row in _rows(f"{_case(sizes)}, memory kept", works, seconds, memory=False):
            print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
