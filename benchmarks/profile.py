"""Profile one loss: time by operation, and memory pages requested from the system.

    python -m benchmarks.profile 32 64 11318

Forward + backward of Proxy-NCA for a batch B, D dimensions and C classes, beside its three matrix
products: it shows why a bar is missed.
"""

import argparse
import resource
from collections import defaultdict

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.losses import LIMIT, OURS, SCALE, Sizes, Work
from benchmarks.timing import interleaved
from nofuss.losses.proxy_nca import ProxyNCA

STEPS = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("batch", "dim", "classes"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    sizes = Sizes(options.batch, options.dim, options.classes)
    loss = sizes.of_module(ProxyNCA(options.classes, options.dim, scale=SCALE))
    works: dict[str, Work] = {LIMIT: sizes.bare_products(), OURS: loss}
    seconds = interleaved(works, repeats=STEPS, warmups=20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        loss()
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / STEPS
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            loss()
    own: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in profiled.key_averages():
        own[event.key] = event.self_cpu_time_total / STEPS / 1e3, event.count // STEPS
    table = Table("operation", "ms a step", "× limit", "calls", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    limit = seconds[LIMIT] * 1e3
    for name, (ms, calls) in sorted(own.items(), key=lambda item: -item[1][0])[:14]:
        table.add_row(name, f"{ms:.3f}", f"{ms / limit:.2f}", str(calls))
    console = Console()
    console.print(f"three bare products {limit:.2f} ms, nofuss {seconds[OURS] * 1e3:.2f} ms")
    console.print(f"{faults:.0f} pages requested from the system a step; under the profiler:")
    console.print(table)


if __name__ == "__main__":
    main()
