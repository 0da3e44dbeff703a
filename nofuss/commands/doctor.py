"""`nofuss doctor`: what the data contain, what is wrong with them, and what to run next."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.config import TrainConfig


def main(
    data: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    run: Annotated[Path | None, Parameter(metavar="RUN")] = None,
    class_level: Annotated[
        int | None, Parameter(metavar="N", show_default="the innermost folder")
    ] = None,
    label_pattern: Annotated[
        str | None, Parameter(metavar="REGEX", show_default="the folder")
    ] = None,
    json: bool = False,
) -> None:
    """Find problems in data: unreadable files, copies, doubtful labels. Changes nothing.

    Args:
        data: Any layout that `nofuss train` reads.
        run: A run directory, whose model finds labels that the nearest neighbours contradict.
        class_level: Which of the folders in folders is the class, as for `nofuss train`.
        label_pattern: A regular expression that finds the class in a path, as for `nofuss train`.
        json: Print everything that was found as JSON.
    """
    from nofuss.data.labelling import labelling_of  # here, so that --help does not load torch
    from nofuss.report.diagnosis import diagnose_data

    config = TrainConfig(class_level=class_level, label_pattern=label_pattern)
    diagnose_data(data, labelling=labelling_of(config), run=run, as_json=json)
