"""`python -m benchmarks [--only SECTION] [--quick]`: print a table, write JSON and figures."""

import argparse
import importlib
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.plots import draw
from benchmarks.timing import Growth, Row

HERE = Path(__file__).parent
SECTIONS = ("losses", "evaluation", "search", "training", "embedding", "scaling", "items")
ASKED = ("busy",)
"""Sections that run only if they are asked for: they load all cores of the machine."""


class Section(Protocol):
    """The interface of a section's module."""

    def rows(self, *, quick: bool) -> Iterator[Row]:
        """Yield rows as they are measured."""
        ...

    def growth(self, *, quick: bool) -> Iterator[Growth]:
        """Yield seconds against sizes."""
        ...


def main() -> None:
    """Measure all sections, print the table, write results and figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=(*SECTIONS, *ASKED), help="run one section instead of all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes: about a minute for each section"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results and figures")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    everything: list[Row] = []
    for name in [options.only] if options.only else SECTIONS:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            console.print(f"{name}: no such section yet; left out")
            continue
        section = cast(Section, importlib.import_module(f"benchmarks.{name}"))
        rows: list[Row] = []
        for row in section.rows(quick=options.quick):
            console.print(f"[dim]{row.case}: {row.method}: {row.seconds * 1e3:,.1f} ms[/dim]")
            rows.append(row)
        growths = list(section.growth(quick=options.quick))
        written = write(name, rows, growths, options.out, quick=options.quick)
        console.print(f"[dim]written: {written}, {len(growths)} figures[/dim]")
        everything += rows
    console.print(table(everything))


def table(rows: list[Row]) -> Table:
    """Return the table of all rows: ratios to the limit and to ours, and whether bars are met."""
    result = Table("work", "ms", "× limit", "× nofuss", "extra MB", "bar", "", box=None)
    for column in result.columns[1:6]:
        column.justify = "right"
    case = None
    for row in rows:
        if (row.section, row.case) != case:
            case = (row.section, row.case)
            result.add_row()
            result.add_row(f"[bold]{row.section}: {row.case}[/bold]")
            ours = next(
                (r.seconds for r in rows if (r.section, r.case) == case and is_ours(r)), math.nan
            )
        met = "" if math.isnan(row.bar) else f"≤ {row.bar:.2f} {verdict(row)}"
        result.add_row(
            f"  {row.method}",
            number(row.seconds * 1e3, 1),
            number(row.ratio, 2),
            number(row.seconds / ours, 2),
            number(row.extra_mb, 0),
            met,
            row.note,
        )
    return result


def is_ours(row: Row) -> bool:
    """Return whether a row is the one that peers are compared with: the first of ours in a case."""
    return row.method.startswith("nofuss")


def verdict(row: Row) -> str:
    """Say whether the row is within its bar."""
    return "met" if row.ratio <= row.bar else "MISSED"


def number(value: float, digits: int) -> str:
    """Format with thousands separators; empty where nothing was measured."""
    return "" if math.isnan(value) else f"{value:,.{digits}f}"


def write(
    section: str, rows: list[Row], growths: list[Growth], folder: Path, *, quick: bool
) -> Path:
    """Write results/SECTION.json and a figure for each growth."""
    environment = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "quick": quick,
    }
    content = {
        "environment": environment,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "growth": [asdict(growth) for growth in growths],
    }
    target = folder / "results" / f"{section}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False)
    target.write_text(text + "\n")
    for growth in growths:
        draw(growth, folder / "figures" / f"{growth.name}.png")
    return target


def without_nan(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
