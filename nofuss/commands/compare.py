"""`nofuss compare`: whether one run finds more than another, on the same items, with intervals."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import DeviceName, check_new_png
from nofuss.errors import UsageError


def main(
    *runs: Annotated[Path, Parameter(name="RUN", required=True)],
    data: Annotated[
        Path | None,
        Parameter(metavar="DATA", show_default="the test classes of the runs"),
    ] = None,
    seed: Annotated[int, Parameter(metavar="N")] = 0,
    json: bool = False,
    figure: Annotated[Path | None, Parameter(metavar="FILE.png")] = None,
    device: DeviceName = "auto",
) -> None:
    """Compare runs on the same items: differences from the first run, with 95% intervals.

    Runs whose settings differ in the seed alone are one method; its scores are averaged, and seeds
    that two methods share are paired. A difference counts only if its intervals over classes and,
    where methods share two seeds or more, over seeds exclude zero; otherwise the methods are
    indistinguishable.

    Args:
        runs: Two or more run directories of `nofuss train`.
        data: Compare on all of these data instead, in any layout that `nofuss train` reads.
        seed: Seed for the bootstrap over classes.
        json: Print the comparison as JSON instead of a table.
        figure: Also draw the differences with their intervals. Never overwritten.
        device: Where to compute, as for `nofuss train`.
    """
    if len(runs) < 2:
        raise UsageError(f"got {len(runs)} run; give two or more to compare")
    if figure is not None:
        check_new_png("--figure", figure)
    from nofuss.report.comparison import compare_runs  # here, so that --help does not load torch

    compare_runs(runs, data=data, seed=seed, as_json=json, figure=figure, device=device)
