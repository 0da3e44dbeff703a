"""`nofuss embed`: write vectors, names and labels to a file."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nofuss.commands import DeviceName, RunPath
from nofuss.errors import UsageError


def main(
    run: RunPath,
    data: Annotated[Path, Positional, arg(metavar="DATA")],
    *,
    out: Annotated[Path, arg(metavar="FILE")],
    device: DeviceName = "auto",
) -> None:
    """Embed data with a run's model and write vectors, names and labels to a file.

    Args:
        run: A run directory of `nofuss train`.
        data: Pictures or vectors, in any layout that `nofuss train` reads.
        out: An .npz or .safetensors file; never overwritten.
        device: Where to compute, as for `nofuss train`.
    """
    if out.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"--out is {out}; expected a name ending in .npz or .safetensors")
    if out.exists():
        raise UsageError(f"{out} exists and is never overwritten; give another --out")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    from nofuss.model.embedding import embed_data  # here, so that --help does not load torch

    embed_data(run, data, out=out, device=device)
