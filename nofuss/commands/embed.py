"""`nofuss embed`: write vectors, names and labels to a file."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from nofuss.commands import DeviceName, RunPath, console
from nofuss.config import Options
from nofuss.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from nofuss.data.collection import Collection


def main(
    run: RunPath,
    data: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FILE")],
    device: DeviceName = "auto",
) -> None:
    """Embed data with a run's model and write vectors, names and labels to a file.

    Args:
        run: A run directory of `nofuss train`.
        data: Pictures or vectors, in any layout that `nofuss train` reads; labels are found as in
            the run's data.
        out: An .npz or .safetensors file; never overwritten.
        device: Where to compute, as for `nofuss train`.
    """
    if out.suffix not in (".npz", ".safetensors"):
        raise UsageError(f"--out is {out}; expected a name ending in .npz or .safetensors")
    if out.exists():
        raise UsageError(f"{out} exists and is never overwritten; give another --out")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist; create it first")
    from nofuss.data.open import open_data, open_usable
    from nofuss.data.readers.folder import (
        labelling_of,  # all here, so that --help does not load torch
    )
    from nofuss.distributed import processes
    from nofuss.model.encoder import load
    from nofuss.model.hub import is_address
    from nofuss.run.directory import Run

    # A model of the Hub has no data of its own to say how labels are found.
    labelling = labelling_of(Options() if is_address(run) else Run.open(run).config)
    encoder = load(run, device=device)
    with processes.in_turn():
        opened = open_data(data, labelling=labelling, unlabelled=True)
        if opened.has_classes:  # −1 in the file would be taken for one
            without = [opened.names[row] for row in (opened.labels < 0).nonzero()[0]]
            skipped = (*opened.skipped, *((name, "items without a class") for name in without))
            opened = replace(opened.subset((opened.labels >= 0).nonzero()[0]), skipped=skipped)
        collection = open_usable(opened, progress=console.progress)
    processes.check_same("data", collection.fingerprint)
    vectors = encoder.embed_collection(collection, progress=console.progress)
    if processes.first():
        _write(out, vectors, collection)
    console.say(f"{len(vectors):,} vectors of {vectors.shape[1]} dimensions in {out}")


def _write(out: Path, vectors: "Tensor", collection: "Collection") -> None:
    """Write vectors, labels and names; class names are an array (.npz) or metadata."""
    import numpy as np
    from safetensors.numpy import save

    from nofuss.files import write_file

    arrays: dict[str, Any] = {"vectors": vectors.numpy()}
    if collection.is_labelled:
        arrays["labels"] = collection.labels
    words = {"names": collection.names, "classes": collection.class_names}
    if out.suffix == ".npz":
        arrays |= {name: np.array(text) for name, text in words.items()}
        with io.BytesIO() as buffer:
            np.savez(buffer, **arrays)
            write_file(out, buffer.getvalue())
    else:
        metadata = {name: json.dumps(text) for name, text in words.items()}
        write_file(out, save(arrays, metadata=metadata))
