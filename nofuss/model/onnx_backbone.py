"""A backbone run by onnxruntime: torch's values to rounding, in about half the time on a CPU.

onnxruntime stores convolutions in blocks and fuses the operations after them, which torch does only
in its compiler. The graph is exported once for given weights and kept in the cache. If the exporter
fails or the features differ, torch runs the backbone as before, with a warning.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.cache import blob
from nofuss.distributed.device import device_of
from nofuss.files import digest, tensor_parts
from nofuss.model.backbones import OWN, Backbone

LARGEST_DIFFERENCE = 1e-4
"""Largest accepted difference of features, relative to the largest feature."""
SMALLEST_SIDE = 96
"""Smaller pictures mean a small network, for which the export takes longer than it saves."""
NEEDED = ("onnxruntime", "onnx", "onnxscript")

PIECE = 4
"""Pictures that a thread runs at once, so that their activations fit its cache."""


class OnnxNetwork(nn.Module):
    """A network run by onnxruntime; torch's network remains for exports and other devices.

    Each thread runs separate pieces of the batch, so that no layer waits for the slowest thread.
    Neither threads nor session survive a copy or a fork, which therefore get their own.
    """

    def __init__(self, network: nn.Module, graph: bytes) -> None:
        super().__init__()
        self.network, self._graph = network, graph
        self._open()

    def _open(self) -> None:
        """Start a session and threads for this process."""
        options = import_module("onnxruntime").SessionOptions()
        options.intra_op_num_threads = 1  # so that it has no threads that spin while they wait
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "nofuss-onnx")
        self._session: Any = import_module("onnxruntime").InferenceSession(
            self._graph, options, providers=["CPUExecutionProvider"]
        )
        self._process: int | None = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        state = {k: v for k, v in vars(self).items() if k not in ("_threads", "_session")}
        return state | {"_process": None}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (B, F)."""
        if inputs.device.type != "cpu" or torch.compiler.is_exporting():
            features: Tensor = self.network(inputs)
            return features
        if self._process != os.getpid():
            self._open()
        pieces = torch.split(inputs.contiguous(), PIECE)
        return torch.cat(list(self._threads.map(self._run, pieces)))

    def _run(self, piece: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run(None, {"inputs": piece.numpy()})[0])


def can_accelerate(backbone: Backbone) -> bool:
    """Return whether onnxruntime can run it: large pictures, a CPU, the packages installed.

    NOFUSS_RUNTIME=torch in the environment switches it off.
    """
    return (
        backbone.name != OWN  # whose graph may depend on more than its weights
        and backbone.preprocessing is not None
        and backbone.preprocessing.size >= SMALLEST_SIDE
        and device_of(backbone).type == "cpu"
        and backbone.precision == "fp32"
        and not isinstance(backbone.network, OnnxNetwork)
        and os.environ.get("NOFUSS_RUNTIME", "onnx") != "torch"
        and all(find_spec(name) is not None for name in NEEDED)
    )


def graph_name(backbone: Backbone) -> str:
    """Return the name of the graph of these weights in the cache."""
    versions = (import_module("onnxruntime").__version__, torch.__version__)
    made_of = f"{backbone.name} {backbone.preprocessing} {versions}".encode()
    return f"graph-{digest(made_of, *tensor_parts(backbone.state_dict()))}"


def accelerate(backbone: Backbone) -> bool:
    """Let onnxruntime run the backbone, in place; return False if torch still runs it.

    It takes some seconds if the cache has no graph of these weights yet.
    """
    if not can_accelerate(backbone):
        return False

    def make() -> bytes:
        graph = exported(backbone)
        if not _gives_the_same(backbone, graph):
            raise ValueError("onnxruntime gives other features")
        return graph

    try:
        backbone.network = OnnxNetwork(backbone.network, blob(graph_name(backbone), make))
    except Exception as error:  # of the exporter, or of onnxruntime
        reason = " ".join(str(error).split())[:200]
        warnings.warn(f"{backbone.name} runs in torch: {reason}", stacklevel=2)
        return False
    return True


def exported(backbone: Backbone) -> bytes:
    """Export the graph of the network, for any batch size."""
    with quietly():
        program = torch.onnx.export(
            backbone.network,
            (_example(backbone),),
            dynamo=True,
            input_names=["inputs"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    graph: bytes = program.model_proto.SerializeToString()
    return graph


def _gives_the_same(backbone: Backbone, graph: bytes) -> bool:
    """Return whether a graph gives the same features as torch, to rounding."""
    inputs, network = _example(backbone), OnnxNetwork(backbone.network, graph)
    with torch.no_grad():
        expected, features = backbone.network(inputs), network(inputs)
    if expected.shape != features.shape:
        return False
    largest = LARGEST_DIFFERENCE * expected.abs().max()
    return bool((expected - features).abs().max() <= largest)


def _example(backbone: Backbone) -> Tensor:
    assert backbone.preprocessing is not None
    size = backbone.preprocessing.size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, backbone.channels, size, size, generator=generator)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide the exporter's messages about its progress and its own changes; errors still pass."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
