"""`nofuss evaluate`: score a run on its test classes, on other data, or in a gallery."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nofuss.commands import DeviceName, RunPath, console
from nofuss.errors import UsageError


def main(
    run: RunPath,
    data: Annotated[
        Path | None, Parameter(name="DATA", show_default="the run's own test classes")
    ] = None,
    /,
    *,
    gallery: Annotated[Path | None, Parameter(metavar="GALLERY")] = None,
    k: Annotated[tuple[int, ...], Parameter(metavar="K", consume_multiple=True)] = (1, 2, 4, 8),
    extended: bool = False,
    rerank: Literal["auto", "none"] = "auto",
    seed: Annotated[int, Parameter(metavar="N")] = 0,
    json: bool = False,
    device: DeviceName = "auto",
) -> None:
    """Score a run: Recall@K, MAP@R, R-precision, NMI and AMI on classes it has not seen.

    Triplets and pairs without labels are scored by the fraction in the right order.
    Without DATA the run is scored on its own test classes, and its scores.json, report.html and
    README.md are updated; if it was scored by folds, or its data have changed, its stored scores
    are shown.

    Args:
        run: A run directory of `nofuss train`.
        data: Other labelled data to score on; a CSV may mark rows as query and gallery.
        gallery: Data to search in. DATA are then the queries; one that is in both never finds
            itself.
        k: Values of K for Recall@K; on the run's own test classes 1, 2, 4 and 8 are included.
        extended: Also print MAP over all ranks, MRR, precision@K, and all scores averaged by class.
        rerank: auto also scores re-ranked results if re-ranking helped on the run's held-out
            classes.
        seed: Seed for k-means.
        json: Print the scores as JSON instead of a table.
        device: Where to compute, as for `nofuss train`.
    """
    if gallery is not None and data is None:
        raise UsageError("--gallery needs the queries: nofuss evaluate RUN QUERIES --gallery DIR")
    if not k or min(k) < 1:
        raise UsageError(f"--k is {' '.join(map(str, k))}; expected whole numbers from 1 up")
    # here, so that --help does not load torch
    from nofuss.commands.scoring import Asked, score_data, score_test_classes
    from nofuss.report import foreign
    from nofuss.run.directory import Run

    how = Asked(sorted(k), extended, rerank, seed)
    with Run.open(run, write=data is None) as opened:  # the scores are written into the run
        if data is None:
            found = score_test_classes(opened, how, device=device, progress=console.progress)
        else:
            found = score_data(opened, data, gallery, how, device=device, progress=console.progress)
    if found is None:  # another process has the scores
        return
    if json:
        console.print_json(found.scores)
        return
    with foreign(run):
        console.score_table(found.title, found.scores, found.method)
    if found.report is not None:
        console.say(f"report: {found.report}")
