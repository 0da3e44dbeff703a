"""Features of a fixed backbone, computed once and kept: epochs on them take seconds."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.cache import cache_directory, read_tensor, write_atomically, write_tensor
from nofuss.data.collection import Collection
from nofuss.data.loader import batches
from nofuss.data.sampling import Indices, in_order
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import any_true
from nofuss.model.backbones import OWN, Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.inference import extract_together, for_inference
from nofuss.model.onnx_backbone import OnnxNetwork, accelerate
from nofuss.terminal import console

WORTH_EXPORT = 1000
"""Pictures from which on exporting the backbone to onnxruntime takes less time than it saves."""
ONNX_BATCH, TORCH_BATCH, VECTOR_BATCH = 8, 32, 4096
"""Items loaded at once; onnxruntime is fastest while a batch stays in cache."""


def backbone_features(
    embedder: Embedder, collection: Collection, preprocessing: Preprocessing, *, workers: int = 0
) -> Tensor:
    """(N, F) features of the centre crops, from the cache where the same were asked for before.

    The key covers items, preprocessing, mirroring, the kind of device and every weight of the
    backbone.
    """
    file, features = _cache_file(embedder, collection, preprocessing), None
    # The key can't cover the pixels of a dataset, or what a module from Python does.
    kept = collection.kind != "dataset" and embedder.backbone.name != OWN
    if kept:
        like = torch.empty(len(collection), embedder.backbone.features, device="meta")
        features = read_tensor(file, like=like)
    if not any_true(features is None)[0]:
        assert features is not None
        return features
    backbone = for_inference(embedder).backbone
    accelerate_for(backbone, len(collection))
    with console.progress("computing features once", len(collection)) as progress:
        features = run_over(backbone, collection, preprocessing, workers=workers, progress=progress)
    if kept:
        write_tensor(file, features)
    return features


def run_over(
    model: Embedder | Backbone,
    collection: Collection,
    preprocessing: Preprocessing | None,
    *,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the features (of a Backbone) or raw embeddings (of an Embedder) of all items."""
    backbone = model.backbone if isinstance(model, Embedder) else model
    in_onnx = isinstance(backbone.network, OnnxNetwork)
    if in_onnx:
        batch, workers = ONNX_BATCH, max(1, workers)
    else:
        batch = VECTOR_BATCH if preprocessing is None else TORCH_BATCH

    def load(chosen: Sequence[Indices]) -> Iterator[Tensor]:
        loaded = batches(collection, preprocessing, chosen, train=False, workers=workers)
        return (batch.inputs for batch in loaded)

    with one_torch_thread() if in_onnx else nullcontext():
        return extract_together(model, load, in_order(len(collection), batch), progress)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Leave the cores to onnxruntime: torch's threads wait for work by spinning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def accelerate_for(backbone: Backbone, count: int) -> None:
    """Let onnxruntime run a backbone that is to see `count` pictures, where that saves time.

    The number alone decides, so that the same command gives the same bits again.
    """
    if count < WORTH_EXPORT:
        return

    def write(file: Path, graph: bytes) -> None:
        write_atomically(file, lambda out: out.write(graph))

    if accelerate(backbone, cache_directory(), write):
        console.say(f"{backbone.name} runs in onnxruntime (NOFUSS_RUNTIME=torch: in torch)")


def _cache_file(embedder: Embedder, collection: Collection, preprocessing: Preprocessing) -> Path:
    key = hashlib.blake2b(digest_size=16)
    key.update(f"{collection.fingerprint()} {preprocessing} {torch.__version__}".encode())
    if (kind := device_of(embedder).type) != "cpu":  # a GPU may round its products
        key.update(kind.encode())
    if embedder.backbone.mirror:
        key.update(b"mirrored")
    for path in collection.paths:  # other pixels in a file of the same size change its time
        key.update(f"{path.stat().st_mtime_ns} ".encode())
    for name, tensor in embedder.backbone.state_dict().items():
        key.update(name.encode())
        key.update(memoryview(tensor.cpu().contiguous().numpy()).cast("B"))
    return cache_directory() / f"features-{key.hexdigest()}.safetensors"
