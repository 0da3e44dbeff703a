"""`nofuss embed`: write vectors, names and labels to a file."""

import io
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from safetensors.numpy import save as to_safetensors
from torch import Tensor
from tyro.conf import Positional, arg

from nofuss.commands import DeviceName, RunPath
from nofuss.data.collection import Collection
from nofuss.data.usable import any_pictures, open_usable
from nofuss.distributed import processes
from nofuss.errors import UsageError
from nofuss.files.atomic import write_file
from nofuss.model.encoder import load
from nofuss.terminal import console


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
    encoder = load(run, device=device)
    with processes.in_turn():
        collection, _ = open_usable(any_pictures(data))
    processes.check_same("data", collection.fingerprint)
    with console.progress("embedding", len(collection)) as progress:
        vectors = encoder.embed_collection(collection, progress=progress)
    if processes.first():
        write_embeddings(out, vectors, collection)
    console.say(f"{len(vectors):,} vectors of {vectors.shape[1]} dimensions in {out}")


def write_embeddings(out: Path, vectors: Tensor, collection: Collection) -> None:
    """Write vectors, labels and names; class names are an array (.npz) or metadata."""
    arrays: dict[str, Any] = {"vectors": vectors.numpy()}
    if collection.labels is not None:
        arrays["labels"] = collection.labels
    if out.suffix == ".npz":
        arrays |= {"names": np.array(collection.names), "classes": np.array(collection.class_names)}
        with io.BytesIO() as buffer:
            np.savez(buffer, **arrays)
            write_file(out, buffer.getvalue())
    else:
        text = {
            "names": json.dumps(collection.names),
            "classes": json.dumps(collection.class_names),
        }
        write_file(out, to_safetensors(arrays, metadata=text))
