"""Embed data with a run's model and write vectors, names and labels to a file: `nofuss embed`."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as to_safetensors
from torch import Tensor

from nofuss.data.collection import Collection
from nofuss.data.usable import any_pictures, open_usable
from nofuss.distributed import processes
from nofuss.files.atomic import write_file
from nofuss.model.encoder import load
from nofuss.terminal import console


def embed_data(run: Path, data: Path, *, out: Path, device: str) -> None:
    """Embed all items of `data` and write them to `out`, an .npz or .safetensors file."""
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
