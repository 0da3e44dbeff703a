"""The table of agreement in the documentation: its rows are checked, and none is missing."""

from pathlib import Path

import pytest

from tests.losses.agreement import Check, checks, largest_differences

DOCUMENT = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
CHECKS = list(checks())


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: f"{c.loss} {c.against}")
def test_documented_differences_are_not_exceeded(check: Check) -> None:
    start = f"| {check.loss} | {check.against} | "
    (line,) = (line for line in DOCUMENT.splitlines() if line.startswith(start))
    documented = [float(cell) for cell in line.removeprefix(start).strip(" |").split("|")]
    found = largest_differences(check, batches=2)
    # Another processor may round otherwise: a few units in the last place, where there are any.
    for got, limit, unit in zip(found, documented, (1e-15, 1e-6), strict=True):
        assert got <= limit + unit
