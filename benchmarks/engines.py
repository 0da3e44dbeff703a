"""`python -m benchmarks.engines`: a million made vectors in each engine, with and without a filter.

Prints a table: seconds to build, milliseconds of one search at a time (median, 95th percentile),
recall@10 against all distances, and megabytes of the processes that hold the index. Servers are
started on loopback (`pip install 'nofuss[servers]'`). Vectors are points around a thousand centres,
like embeddings of classes; of two columns, `price` is a number below 100, `shop` one of four names.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nofuss import Index
from nofuss.data.columns import Column
from nofuss.geometry import normalize
from nofuss.search.engines import open_engine
from nofuss.search.filter import Condition, parse_filter
from nofuss.search.index import About, Item
from nofuss.search.index import Index as AnyIndex
from torture.databases import ENGINES, missing, running

K, CHUNK = 10, 10_000
SHOPS = ("north", "south", "east", "west")
FILTERS = (None, "price<20 and shop=='north'", "price<1")
OWN = ("exact",)


class Made:
    """The vectors, columns and queries that all engines get."""

    def __init__(self, items: int, dim: int, queries: int) -> None:
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(1000, dim, generator=generator)

        def points(count: int) -> Tensor:
            which = torch.randint(1000, (count,), generator=generator)
            return normalize(centres[which] + 0.5 * torch.randn(count, dim, generator=generator))

        self.vectors, self.queries = points(items), points(queries)
        random = np.random.default_rng(0)
        self.names = [f"{i}.jpg" for i in range(items)]
        price = (random.integers(0, 10_000, items) / 100).tolist()
        shop = [SHOPS[i] for i in random.integers(0, 4, items)]
        self.columns = {"price": Column("number", price), "shop": Column("text", shop)}

    def index(self) -> Index:
        """Return our own index of everything."""
        return Index.build(self.vectors, names=self.names, columns=self.columns)

    def items(self, start: int) -> list[Item]:
        """Return a chunk of items as `nofuss index` would write them."""
        price, shop = (self.columns[name].values for name in ("price", "shop"))
        return [
            Item(
                self.names[i],
                None,
                {"price": price[i], "shop": shop[i]},
                "made",
                "",
                self.vectors[i],
            )
            for i in range(start, min(start + CHUNK, len(self.names)))
        ]


def main() -> None:
    """Measure the engines one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=(*OWN, *ENGINES), default=(*OWN, *ENGINES))
    options = parser.parse_args()
    made = Made(options.items, options.dim, options.queries)
    exact = made.index()
    conditions = [
        None if text is None else parse_filter(text, exact.about.types) for text in FILTERS
    ]
    truths = [
        torch.tensor([hits.distances for hits in exact.search(made.queries, K, where=where)])
        for where in conditions
    ]
    del exact
    table = Table("engine", "build, s", "MB", "filter", "p50, ms", "p95, ms", f"recall@{K}")
    for engine in options.only:
        if engine in ENGINES and missing(engine):
            print(f"{engine} {missing(engine)}")
            continue
        for row in measured(engine, made, conditions, truths):
            print(json.dumps(row), flush=True)
            table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def measured(
    engine: str, made: Made, conditions: list[Condition | None], truths: list[Tensor]
) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each filter."""
    with tempfile.TemporaryDirectory(prefix="engines-") as home:
        if engine in OWN:
            before = own_megabytes()
            began = time.perf_counter()
            index = made.index()
            head = (engine, f"{time.perf_counter() - began:.0f}", f"{own_megabytes() - before:.0f}")
            yield from searched(index, made, conditions, truths, head)
            return
        with running(engine, Path(home)) as url:
            about = About("made", made.vectors.shape[1])
            store = open_engine(url.format("made"), about, create=True)
            before = server_megabytes(engine)
            began = time.perf_counter()
            about = about._replace(sources={"made": {"price": "number", "shop": "text"}})
            store.commit(about, source="made")
            for start in range(0, len(made.names), CHUNK):
                store.put(made.items(start))
            written = time.perf_counter() - began
            store.commit(about)
            spent = time.perf_counter() - began
            print(f"{engine}: written in {written:.0f} s, finished after {spent:.0f}", flush=True)
            store.search(made.queries, K)  # what is on disk only is read now
            megabytes = server_megabytes(engine) - before
            head = (engine, f"{spent:.0f}", f"{megabytes:.0f}")
            yield from searched(store, made, conditions, truths, head)
            store.close()


def searched(
    index: AnyIndex,
    made: Made,
    conditions: list[Condition | None],
    truths: list[Tensor],
    head: tuple[str, ...],
) -> Iterator[tuple[str, ...]]:
    """Time single searches with each filter; compare what they find."""
    for text, where, truth in zip(FILTERS, conditions, truths, strict=True):
        for query in made.queries[:5]:
            index.search(query[None], K, where=where)
        seconds, shares = [], []
        for query, true in zip(made.queries, truth, strict=True):
            began = time.perf_counter()
            [hits] = index.search(query[None], K, where=where)
            seconds.append(time.perf_counter() - began)
            found = torch.tensor(hits.distances)
            shares.append(float((found.square() <= true[-1].square() + 1e-6).double().mean()))
        p50, p95 = 1e3 * np.percentile(seconds, [50, 95])
        recall = f"{np.mean(shares):.3f}"
        yield (*head, text or "none", f"{p50:.1f}", f"{p95:.1f}", recall)


def own_megabytes() -> float:
    """Return the memory of this process."""
    return _proportional("self")


def server_megabytes(engine: str) -> float:
    """Return the memory of the servers that this process has started; of this one for a file."""
    if engine == "milvus-lite":
        return own_megabytes()
    total = 0.0
    for folder in Path("/proc").iterdir():
        try:
            name = (folder / "comm").read_text().strip() if folder.name.isdigit() else ""
            total += _proportional(folder.name) if name in ("milvus", "postgres") else 0.0
        except OSError:  # it has ended
            continue
    return total


def _proportional(process: str) -> float:
    """Return the memory of a process in MB; what it shares with others is divided among them."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
