"""`nofuss reproduce`: run the paper's experiments and compare the numbers."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from nofuss.commands import DeviceName


def main(
    names: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="NAME", help_behavior_hint="(default: all for which there are data)"),
    ] = (),
    *,
    data: Annotated[
        Path | None,
        arg(metavar="DIR", help_behavior_hint="(default: the built-in characters)"),
    ] = None,
    budget: Literal["minutes", "hours", "paper"] = "minutes",
    out: Annotated[Path, arg(metavar="DIR")] = Path("reproduction"),
    seeds: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: by the budget, 3 or more)")
    ] = None,
    weights: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    device: DeviceName = "auto",
) -> None:
    """Reproduce the paper's tables and figures, and put its numbers beside ours.

    Args:
        names: cub, cars, products, characters (tables); convergence, fractional, dynamic,
            batch-size, bounds, retrieval (figures).
        data: The official folder of CUB-200-2011, Cars196 or Stanford Online Products, or the
            folder that holds them.
        budget: minutes trains a head on fixed features, or a small convnet on characters; hours
            fine-tunes; paper uses the paper's setting.
        out: Where report.html, results.json and the finished trainings (work/) go; an interrupted
            command resumes from them.
        seeds: Number of trainings of each method, a seed each.
        weights: With --budget paper: a public BN-Inception file to start from, as the paper did.
        device: Where to compute, as for `nofuss train`.
    """
    from nofuss.paper.reproduce import reproduce  # here, so that --help does not load torch

    reproduce(names, data=data, budget=budget, out=out, seeds=seeds, weights=weights, device=device)
