"""`nofuss index`: embed a folder for search."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import DeviceName, RunPath, console


def main(
    run: RunPath,
    data: Annotated[Path | None, Parameter(name="DIR", show_default="the run's own")] = None,
    /,
    *,
    remove: bool = False,
    to: Annotated[str | None, Parameter(metavar="URL")] = None,
    device: DeviceName = "auto",
) -> None:
    """Embed a folder for search: add it to the run's index, or update what changed in it.

    Items of other folders stay in the index.

    Args:
        run: A run directory of `nofuss train`.
        data: Any layout that `nofuss train` reads; pictures outside class folders have no label.
        remove: Remove the items of DIR from the index instead.
        to: Keep the index in a database instead: milvus:FILE.db, milvus://HOST:19530/COLLECTION or
            postgresql://HOST/DATABASE[?table=TABLE]; see docs/engines.md. Then give search and
            serve the same URL with --index.
        device: Where to compute, as for `nofuss train`.
    """
    # here, so that --help does not load torch
    from nofuss.search.update import update_index

    update_index(run, data, to=to, remove=remove, device=device, progress=console.progress)
