"""`nofuss doctor`: what the data contain, what is wrong with them, and what to run next."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


def main(
    data: Annotated[Path, Positional, arg(metavar="DATA")],
    *,
    run: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None,
    json: bool = False,
) -> None:
    """Find problems in data: unreadable files, copies, doubtful labels. Changes nothing.

    Args:
        data: Any layout that `nofuss train` reads.
        run: A run directory, whose model finds labels that the nearest neighbours contradict.
        json: Print everything that was found as JSON.
    """
    from nofuss.report.diagnosis import diagnose_data  # here, so that --help does not load torch

    diagnose_data(data, run=run, as_json=json)
