"""`nofuss index`: embed a folder for search."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import DeviceName, RunPath, console
from nofuss.errors import UsageError


def main(
    run: RunPath,
    data: Annotated[Path | None, Parameter(name="DIR", show_default="the run's own")] = None,
    /,
    *,
    learn: Annotated[bool, Parameter(negative=())] = False,
    undo: Annotated[bool, Parameter(negative=())] = False,
    remove: bool = False,
    to: Annotated[str | None, Parameter(metavar="URL")] = None,
    device: DeviceName = "auto",
) -> None:
    """Embed a folder for search: add it to the run's index, or update what changed in it.

    Items of other folders stay in the index.

    Args:
        run: A run directory of `nofuss train`.
        data: Any layout that `nofuss train` reads; pictures outside class folders have no label.
        learn: Also learn from the labelled items that were added: fit the head again with them,
            unless that makes them harder to find, and embed all items with it. Takes seconds to
            minutes.
        undo: Return to the model from before any --learn; items added since stay in the index.
        remove: Remove the items of DIR from the index instead.
        to: Keep the index in a database instead: milvus:FILE.db, milvus://HOST:19530/COLLECTION or
            postgresql://HOST/DATABASE[?table=TABLE]; see docs/engines.md. Then give search and
            serve the same URL with --index.
        device: Where to compute, as for `nofuss train`.
    """
    if (learn or undo) and (to is not None or remove or learn == undo):
        raise UsageError(
            "--learn and --undo go alone with the run's own index; leave the others out"
        )
    # here, so that --help does not load torch
    from nofuss.search.update import update_index
    from nofuss.training import learn as learning

    if undo:
        learning.undo(run, device=device, progress=console.progress)
        return
    update_index(run, data, to=to, remove=remove, device=device, progress=console.progress)
    if learn:
        learning.learn(run, device=device, progress=console.progress)
