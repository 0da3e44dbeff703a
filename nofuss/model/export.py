"""A model as ONNX, its preprocessing in the metadata, checked against torch.

The graph takes what preprocessing gives and returns unit embeddings, for any batch size.
"""

import contextlib
import dataclasses
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode_resized
from nofuss.data.detect import open_data
from nofuss.data.labelling import BY_FOLDER, Labelling
from nofuss.data.transforms import fitted, test_views
from nofuss.errors import NofussError, UsageError
from nofuss.geometry import normalize
from nofuss.model.encoder import Encoder
from nofuss.model.onnx_backbone import quietly
from nofuss.progress import Progress, silent, working

log = logging.getLogger("nofuss")

CHECKED = 16
"""Number of inputs that both runtimes are compared on."""
LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference of an entry of unit embeddings; a correct export stays far below."""
NEEDED = "pip install 'nofuss[onnx]'"


class UnitEmbedding(nn.Module):
    """The encoder as one graph: embeddings of unit length."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.embedder = encoder.embedder

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, …) to unit embeddings (B, dim)."""
        return normalize(self.embedder(inputs))


def to_onnx(encoder: Encoder, inputs: Tensor, onnx: Any, *, progress: Progress = silent) -> bytes:
    """Return the file's content: any batch size, with a description of inputs in the metadata."""
    with working(progress, "exporting the network"), quietly():
        program = torch.onnx.export(
            UnitEmbedding(encoder).eval(),
            (inputs[:2].contiguous(),),
            dynamo=True,
            input_names=["inputs"],
            output_names=["embeddings"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for key, value in metadata(encoder).items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def metadata(encoder: Encoder) -> dict[str, str]:
    """Return what someone who has only the file needs to know."""
    about = {
        "producer": "nofuss",
        "output": "unit embeddings (batch, dim); compare by Euclidean distance or dot product",
        "dim": str(encoder.dim),
        "class_names": json.dumps(list(encoder.class_names)),
        "extra": json.dumps(encoder.extra),
    }
    if encoder.preprocessing is None:
        return about | {"input": f"float32 vectors (batch, {encoder.embedder.backbone.channels})"}
    return about | {
        "input": describe(encoder.preprocessing),
        "preprocessing": json.dumps(dataclasses.asdict(encoder.preprocessing)),
    }


def describe(preprocessing: Preprocessing) -> str:
    """Describe the preprocessing of a picture in words."""
    p = preprocessing
    channels = 1 if p.mode == "L" else 3
    sides = "both sides" if p.squash else "the short side"
    return (
        f"float32 (batch, {channels}, {p.size}, {p.size}): the picture upright, in Pillow mode "
        f"{p.mode}, transparency over white, {sides} resized to {p.resize} (bilinear, "
        f"antialiased), centre crop of {p.size}, values 0 to 255 mapped to (value - mean) / std "
        f"with mean {list(p.mean[:channels])} and std {list(p.std[:channels])}"
    )


def real_inputs(
    encoder: Encoder, data: Path | None, labelling: Labelling = BY_FOLDER
) -> tuple[Tensor, str]:
    """Return a few items of the run's data as model inputs; noise if the data are not readable."""
    p = encoder.preprocessing
    channels = encoder.embedder.backbone.channels
    try:
        collection = open_data(data, labelling=labelling)
        rows = np.linspace(0, len(collection) - 1, min(CHECKED, len(collection))).astype(int)
        if p is None:
            assert collection.array is not None
            return torch.from_numpy(np.asarray(collection.array)[rows]), "of the run's own vectors"
        if collection.array is not None:
            return test_views(
                fitted(np.asarray(collection.array)[rows], p), p
            ), "of the run's own pictures"
        pictures = []
        for i in rows:
            with contextlib.suppress(PictureError):
                pictures.append(decode_resized(collection.paths[i], p))
        if pictures:
            return test_views(pictures, p), "of the run's own pictures"
    except NofussError as error:
        log.warning(f"the run's data can't be read ({error}); comparing on noise instead")
    generator = torch.Generator().manual_seed(0)
    shape = (channels,) if p is None else (1 if p.mode == "L" else 3, p.size, p.size)
    return torch.randn(CHECKED, *shape, generator=generator), "inputs of noise"


@torch.no_grad()
def largest_difference(encoder: Encoder, inputs: Tensor, content: bytes, runtime: Any) -> float:
    """Return the largest difference between torch and onnxruntime, in batches of one and all."""
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    expected = normalize(encoder.embedder(inputs)).numpy()
    x = np.ascontiguousarray(inputs.numpy())
    outputs = (session.run(None, {"inputs": x})[0], session.run(None, {"inputs": x[:1]})[0])
    return max(float(np.abs(got - expected[: len(got)]).max()) for got in outputs)


def onnx_packages() -> tuple[Any, Any]:
    """Import onnx and onnxruntime; UsageError with the command that installs them."""
    try:
        import_module("onnxscript")  # torch needs it to export
        return import_module("onnx"), import_module("onnxruntime")
    except ImportError as error:
        raise UsageError(f"export to ONNX needs {error.name}: {NEEDED}") from None
