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
        arg(help_behavior_hint="(default: as it is; exact at first)"),
    ] = None,
    device: DeviceName = "auto",
) -> None:
    """Embed a folder for search; only what changed is embedded again. Other folders stay in.

    Args:
        run: A run directory of `nofuss train`.
        data: Pictures or vectors in any layout that `nofuss train` reads, of any classes; pictures
            outside class folders have no label.
        remove: Take the pictures of DIR out of the index instead.
        kind: approximate is for many millions and needs faiss.
        device: Where to compute, as for `nofuss train`.
    """
    from nofuss.search.indexing import index_run  # here, so that --help does not load torch

    index_run(run, data, remove=remove, kind=kind, device=device)
