"""`nofuss index`: embed a folder for search."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from nofuss.commands import DeviceName, RunPath


def main(
    run: RunPath,
    data: Annotated[
        Path | None, Positional, arg(metavar="DIR", help_behavior_hint="(default: the run's own)")
    ] = None,
    *,
    remove: bool = False,
    kind: Annotated[
        Literal["exact", "approximate"] | None,
        arg(help_behavior_hint="(default: unchanged; a new index is exact)"),
    ] = None,
    device: DeviceName = "auto",
) -> None:
    """Embed a folder for search: add it to the run's index, or update what changed in it.

    Items of other folders stay in the index.

    Args:
        run: A run directory of `nofuss train`.
        data: Pictures or vectors in any layout that `nofuss train` reads, of any classes; pictures
            outside class folders have no label.
        remove: Remove the items of DIR from the index instead.
        kind: approximate is for many millions of items and needs faiss.
        device: Where to compute, as for `nofuss train`.
    """
    from nofuss.search.indexing import index_run  # here, so that --help does not load torch

    index_run(run, data, remove=remove, kind=kind, device=device)
