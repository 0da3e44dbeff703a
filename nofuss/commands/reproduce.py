"""`nofuss reproduce`: run the paper's experiments and compare the numbers."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nofuss.commands import DeviceName, console


def main(
    *names: Annotated[str, Parameter(name="NAME", show_default="all for which there are data")],
    data: Annotated[
        Path | None,
        Parameter(metavar="DIR", show_default="the built-in characters"),
    ] = None,
    budget: Literal["minutes", "hours", "paper"] = "minutes",
    out: Annotated[Path, Parameter(metavar="DIR")] = Path("reproduction"),
    seeds: Annotated[
        int | None, Parameter(metavar="N", show_default="by the budget, 1 or 3")
    ] = None,
    weights: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    device: DeviceName = "auto",
) -> None:
    """Reproduce the paper's tables and figures, and put its numbers beside ours.

    Args:
        names: Tables: cub, cars, products, characters.
            Figures: convergence, fractional, dynamic, batch-size, bounds, retrieval.
        data: Folder of CUB-200-2011, Cars196 or Stanford Online Products, or one that holds them;
            or the word han: 22,634 characters, which products also takes without --data.
        budget: minutes trains a head on fixed features, or a small convnet on characters;
            hours fine-tunes; paper uses the paper's setting.
        out: Folder for report.html, results.json and finished trainings, which are not repeated.
            Only one command at a time can use it.
        seeds: Trainings of each method, each with its own seed.
        weights: With --budget paper: a public BN-Inception file to start from, as the paper did.
        device: Where to compute, as for `nofuss train`.
    """
    from nofuss.paper.reproduce import reproduce  # here, so that --help does not load torch

    reproduce(
        names,
        data=data,
        budget=budget,
        out=out,
        seeds=seeds,
        weights=weights,
        device=device,
        progress=console.progress,
    )
