"""`nofuss compare`: whether one run finds more than another, on the same items, with intervals."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from nofuss.commands import DeviceName, check_new_png, console
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

    found = compare_runs(
        runs, data=data, seed=seed, figure=figure, device=device, progress=console.progress
    )
    if json:
        console.print_json(found)
        return
    _show(found)
    if figure is not None:
        console.say(f"figure of the differences: {figure}")


def _show(found: dict[str, Any]) -> None:
    """Print a row a method."""
    labels, rows = {"recall@1": "Recall@1", "map@r": "MAP@R"}, []
    for method in found["methods"]:
        seeds = f" ({len(method['runs'])} seeds)" if len(method["runs"]) > 1 else ""
        cells = [f"{method['name']}{seeds}"]
        for score in labels:
            gap = method[score].get("difference")
            cells.append(f"{100 * method[score]['mean']:.2f}")
            cells.append("" if gap is None else _words(gap))
        rows.append(cells)
    header = [""]
    for label in labels.values():
        header += [label, "difference from the first, 95%"]
    queries = f"{found['queries']:,} queries of {found['classes']:,} classes"
    console.table(f"{found['data']}: {queries}", header, rows)
    others = found["methods"][1:]
    if unpaired := [m["name"] for m in others if not m["recall@1"]["difference"]["over_seeds"]]:
        console.say(
            f"the verdict on {', '.join(unpaired)} does not account for the seed: that needs two "
            "seeds or more that both methods were trained with"
        )


def _words(gap: dict[str, Any]) -> str:
    low, high = (100 * end for end in gap["over_classes"])
    words = f"{100 * gap['mean']:+.2f} ({low:+.2f} to {high:+.2f} over classes"
    if gap["over_seeds"]:
        low, high = (100 * end for end in gap["over_seeds"])
        words += f"; {low:+.2f} to {high:+.2f} over seeds"
    return f"{words}): {gap['verdict']}"
