"""A backbone run by onnxruntime: torch's values to rounding, in about half the time on a CPU.

onnxruntime lays convolutions out in blocks and fuses what follows them, which torch does not do
outside its compiler. The graph is exported once for given weights and kept; where the runtime or
the exporter is missing, or the result differs, torch computes as before and a line says so.
"""

import contextlib
import hashlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nofuss.distributed.device import device_of
from nofuss.model.backbones import OWN, Backbone

LARGEST_DIFFERENCE = 1e-4
"""Of features, relative to their largest; a right export stays far below."""
SMALLEST_SIDE = 96
"""Smaller pictures mean a small network, where the export costs more than it saves."""
NEEDED = ("onnxruntime", "onnx", "onnxscript")

Write = Callable[[Path, bytes], object]


PIECE = 4
"""Pictures that a thread runs at once: their activations stay in its cache."""


class OnnxNetwork(nn.Module):
    """A network's graph in onnxruntime; the network itself stays for exports and other devices.

    Each thread runs pieces of the batch of its own: no layer waits for the slowest thread.
    """

    def __init__(self, network: nn.Module, graph: bytes) -> None:
        super().__init__()
        self.network = network
        options = import_module("onnxruntime").SessionOptions()
        options.intra_op_num_threads = 1
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), "nofuss-onnx")
        self._session: Any = import_module("onnxruntime").InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Features (B, F)."""
        if inputs.device.type != "cpu" or torch.compiler.is_exporting():
            features: Tensor = self.network(inputs)
            return features
        pieces = torch.split(inputs.contiguous(), PIECE)
        return torch.cat(list(self._threads.map(self._run, pieces)))

    def _run(self, piece: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run(None, {"inputs": piece.numpy()})[0])


def can_accelerate(backbone: Backbone) -> bool:
    """Whether onnxruntime may run it: pictures of some size, on a CPU, the packages installed.

    NOFUSS_RUNTIME=torch in the environment says no.
    """
    return (
        backbone.name != OWN  # whose graph may depend on more than its weights
        and backbone.preprocessing is not None
        and backbone.preprocessing.size >= SMALLEST_SIDE
        and device_of(backbone).type == "cpu"
        and not isinstance(backbone.network, OnnxNetwork)
        and os.environ.get("NOFUSS_RUNTIME", "onnx") != "torch"
        and all(find_spec(name) is not None for name in NEEDED)
    )


def graph_file(backbone: Backbone, folder: Path) -> Path:
    """Where the graph of these weights is kept."""
    key = hashlib.blake2b(digest_size=16)
    versions = (import_module("onnxruntime").__version__, torch.__version__)
    key.update(f"{backbone.name} {backbone.preprocessing} {versions}".encode())
    for name, tensor in backbone.state_dict().items():
        key.update(name.encode())
        key.update(memoryview(tensor.cpu().contiguous().numpy()).cast("B"))
    return folder / f"backbone-{key.hexdigest()}.onnx"


def accelerate(backbone: Backbone, folder: Path, write: Write) -> bool:
    """Let onnxruntime run the backbone, in place; False where it stays with torch.

    Takes some seconds where no graph of these weights is kept in `folder` yet.
    """
    if not can_accelerate(backbone):
        return False
    file = graph_file(backbone, folder)
    with contextlib.suppress(OSError):
        if _replace(backbone, file.read_bytes()):
            return True
    try:
        graph = exported(backbone)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        warnings.warn(f"{backbone.name} stays with torch: {reason}", stacklevel=2)
        return False
    if not _replace(backbone, graph):
        warnings.warn(f"{backbone.name} stays with torch: onnxruntime differs", stacklevel=2)
        return False
    write(file, graph)
    return True


def exported(backbone: Backbone) -> bytes:
    """The graph of the network, for any batch size."""
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


def _replace(backbone: Backbone, graph: bytes) -> bool:
    """Take the graph's network if it gives the features that torch gives."""
    try:
        network = OnnxNetwork(backbone.network, graph)
        inputs = _example(backbone)
        with torch.no_grad():
            expected, found = backbone.network(inputs), network(inputs)
    except Exception:  # a damaged file, or a version that can't read it: exported anew
        return False
    if expected.shape != found.shape:
        return False
    if not (expected - found).abs().max() <= LARGEST_DIFFERENCE * expected.abs().max():
        return False
    backbone.network = network
    return True


def _example(backbone: Backbone) -> Tensor:
    assert backbone.preprocessing is not None
    size = backbone.preprocessing.size
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, backbone.channels, size, size, generator=generator)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """The exporter talks of its progress and of its own future; errors still come through."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
