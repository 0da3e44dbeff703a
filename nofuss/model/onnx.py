"""onnxruntime: it runs a backbone in about half of torch's time on a CPU, and files for others.

onnxruntime stores convolutions in blocks and fuses the operations after them, which torch does only
in its compiler. The graph of a backbone is exported once for given weights, compared with torch to
rounding, and cached; from then on it is used from the first picture. Training leaves it there. If
the exporter fails or the features differ, torch runs the backbone as before, with a warning.

`export_model` makes a file for other programs: it takes what preprocessing gives and returns unit
embeddings, for any batch size; the metadata describe the preprocessing.
"""

import copy
import dataclasses
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nofuss.cache import blob, holds_blob, name_of
from nofuss.distributed.device import device_of
from nofuss.errors import UsageError, one_line
from nofuss.geometry import normalize
from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder, for_inference
from nofuss.progress import Progress, silent, working

log = logging.getLogger("nofuss")

WORTH_EXPORT = 500
"""Number of views from which exporting a backbone saves time; a mirror image is a view too."""
LARGEST_DIFFERENCE = 1e-4
"""Largest accepted difference of features, as a fraction of the largest feature."""
CHECKED = 16
"""Number of random inputs on which an exported file is compared with torch."""
SMALLEST_SIDE = 96
"""Smaller pictures mean a small network, for which the export takes longer than it saves."""
NEEDED = ("onnxruntime", "onnx", "onnxscript")
PIECE = 4
"""Pictures that a thread runs at once, so that their activations fit its cache."""
_deciding = Lock()  # of the page's threads: while one exports, the others wait for the graph


# A backbone in onnxruntime


class OnnxNetwork(nn.Module):
    """A network run by onnxruntime; torch's network remains for exports and other devices.

    Each thread runs separate pieces of the batch, so that no layer waits for the slowest thread.
    """

    def __init__(self, network: nn.Module, graph: bytes) -> None:
        super().__init__()
        self.network, self._graph = network, graph
        runtime = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1  # so that it has no threads that spin while they wait
        self._session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "nofuss-onnx")

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnnxNetwork":
        return OnnxNetwork(copy.deepcopy(self.network, memo), self._graph)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (B, F)."""
        if inputs.device.type != "cpu" or torch.compiler.is_exporting():
            features: Tensor = self.network(inputs)
            return features
        pieces = torch.split(inputs.contiguous(), PIECE)
        return torch.cat(list(self._threads.map(self._run, pieces)))

    def _run(self, piece: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run(None, {"inputs": piece.numpy()})[0])


def can_accelerate(backbone: Backbone) -> bool:
    """Return whether onnxruntime can run it: large pictures, a CPU, the packages installed.

    NOFUSS_RUNTIME=torch in the environment switches it off.
    """
    return (
        backbone.key is not None
        and backbone.preprocessing is not None
        and backbone.preprocessing.size >= SMALLEST_SIDE
        and device_of(backbone).type == "cpu"
        and backbone.precision == "fp32"
        and not isinstance(backbone.network, OnnxNetwork)
        and os.environ.get("NOFUSS_RUNTIME", "onnx") != "torch"
        and all(find_spec(name) is not None for name in NEEDED)
    )


def accelerate(backbone: Backbone, views: int, *, progress: Progress = silent) -> None:
    """Let onnxruntime run a backbone, in place, on as many views as are still to be computed.

    backbone: of a copy `for_inference`. onnxruntime is used where the cache has the graph of these
    weights, or exporting it pays; else, and where onnxruntime can't run it, torch is.
    """
    for part in backbone.parts:
        _accelerate(part, views, progress)


def _accelerate(backbone: Backbone, views: int, progress: Progress) -> None:
    with _deciding:
        if not can_accelerate(backbone):
            return
        try:
            name = graph_name(backbone)
            if views < WORTH_EXPORT and not holds_blob(name):
                return
            graph = blob(name, partial(_export_features, backbone, progress))
            backbone.network = OnnxNetwork(backbone.network, graph)
        except Exception as error:  # of the exporter, or of onnxruntime
            log.warning(f"{backbone.name} runs in torch: {one_line(error)[:200]}")


def _export_features(backbone: Backbone, progress: Progress) -> bytes:
    """Return the graph of a backbone, which gives torch's features to rounding."""
    example = [random_inputs(backbone, 2)]
    with working(progress, "exporting the network to onnxruntime"):
        graph = bytes(_exported(backbone.network, example, "features").SerializeToString())
        if not largest_difference(backbone.network, example, graph) <= LARGEST_DIFFERENCE:
            raise ValueError("onnxruntime gives other features")
    log.info(f"{backbone.name} runs in onnxruntime from now on (NOFUSS_RUNTIME=torch: in torch)")
    return graph


def cache_graph(embedder: Embedder, *, progress: Progress = silent) -> None:
    """Leave the graph of a trained model in the cache, for whoever embeds with it next."""
    accelerate(for_inference(embedder).backbone, WORTH_EXPORT, progress=progress)


def graph_name(backbone: Backbone) -> str:
    """Return the name of the graph of these weights in the cache."""
    version = import_module("onnxruntime").__version__
    return name_of("graph", f"{backbone.key} {version}".encode())


# Files for other programs


def export_model(
    embedder: Embedder, *, class_names: Sequence[str], extra: dict[str, Any]
) -> tuple[bytes, float]:
    """Return an ONNX file that gives unit embeddings, and its largest difference from torch.

    Its metadata describe the inputs. UsageError without the packages that it takes.
    """
    onnx, _ = onnx_packages()
    module, parts = UnitEmbedding(embedder).eval(), embedder.backbone.parts
    inputs = [random_inputs(part, CHECKED) for part in parts]
    model = _exported(module, [each[:2] for each in inputs], "embeddings")
    about = {
        "producer": "nofuss",
        "input": "; ".join(describe_inputs(part) for part in parts),
        "output": "unit embeddings (batch, dim); compare by Euclidean distance or dot product",
        "dim": str(embedder.dim),
        "class_names": json.dumps(list(class_names)),
        "extra": json.dumps(extra),
    }
    looks = [dataclasses.asdict(p.preprocessing) for p in parts if p.preprocessing is not None]
    if looks:
        about["preprocessing"] = json.dumps(looks if len(looks) > 1 else looks[0])
    for key, value in about.items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model)
    content = bytes(model.SerializeToString())
    return content, largest_difference(module, inputs, content)


class UnitEmbedding(nn.Module):
    """An embedder whose embeddings have unit length."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, *views: Tensor) -> Tensor:
        """Map inputs (B, …) of each part of the backbone to unit embeddings (B, dim)."""
        return normalize(self.embedder(*views))


def describe_inputs(backbone: Backbone) -> str:
    """Say how a picture becomes an input, for someone who has only the file."""
    p = backbone.preprocessing
    if p is None:
        return f"float32 vectors (batch, {backbone.channels})"
    sides = "both sides" if p.squash else "the short side"
    return (
        f"float32 (batch, {backbone.channels}, {p.size}, {p.size}): the picture upright, in Pillow "
        f"mode {p.mode}, transparency over white, {sides} resized to {p.resize} (bilinear, "
        f"antialiased), centre crop of {p.size}, values 0 to 255 mapped to (value - mean) / std "
        f"with mean {list(p.mean)} and std {list(p.std)}"
    )


def onnx_packages() -> tuple[Any, Any]:
    """Import onnx and onnxruntime; UsageError with the command that installs them."""
    try:
        import_module("onnxscript")  # torch needs it to export
        return import_module("onnx"), import_module("onnxruntime")
    except ImportError as error:
        raise UsageError(f"export to ONNX needs {error.name}: pip install 'nofuss[onnx]'") from None


# The exporter


@torch.no_grad()
def largest_difference(
    module: Callable[..., Tensor], inputs: Sequence[Tensor], graph: bytes
) -> float:
    """Return the largest difference between torch and onnxruntime, in batches of one and all.

    As a fraction of the largest value.
    """
    _, runtime = onnx_packages()
    session = runtime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    expected = module(*inputs).numpy()
    given = {
        each.name: np.ascontiguousarray(x.numpy())
        for each, x in zip(session.get_inputs(), inputs, strict=True)
    }
    first = {name: x[:1] for name, x in given.items()}
    outputs = (session.run(None, given)[0], session.run(None, first)[0])
    largest = max(np.abs(got - expected[: len(got)]).max() for got in outputs)
    return float(largest / np.abs(expected).max())


def random_inputs(backbone: Backbone, count: int) -> Tensor:
    """Return random inputs of a backbone, the same every time."""
    p = backbone.preprocessing
    shape = (backbone.channels,) if p is None else (backbone.channels, p.size, p.size)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def _exported(module: nn.Module, examples: Sequence[Tensor], output: str) -> Any:
    """Return the graph of a module as an ONNX model, for any batch size."""
    shapes, several = tuple({0: torch.export.Dim("batch")} for _ in examples), len(examples) > 1
    with _quietly():
        program = torch.onnx.export(
            module,
            tuple(examples),
            dynamo=True,
            input_names=[f"inputs_{i + 1}" if several else "inputs" for i in range(len(examples))],
            output_names=[output],
            # To torch all views are one parameter.
            dynamic_shapes=(shapes,) if isinstance(module, UnitEmbedding) else shapes,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the exporter's messages about its progress and its own changes; errors still pass."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
