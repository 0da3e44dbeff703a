"""Features of a fixed backbone, computed once and kept in the cache: an epoch takes seconds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.cache import cache_directory, make_room, read_tensor, try_write, write_tensor
from nofuss.data.collection import Collection
from nofuss.data.loader import batches
from nofuss.data.sampling import Indices, in_order
from nofuss.distributed.device import device_of
from nofuss.distributed.processes import any_true
from nofuss.files.checksum import Bytes, digest_of, tensor_parts
from nofuss.model.backbones import OWN, Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.inference import extract_together, for_inference
from nofuss.model.onnx_backbone import OnnxNetwork, accelerate
from nofuss.terminal import console

WORTH_EXPORT = 1000
"""Number of pictures from which exporting the backbone to onnxruntime saves time."""
ONNX_BATCH, TORCH_BATCH, VECTOR_BATCH = 8, 32, 4096
"""Items loaded at once; onnxruntime is fastest while a batch fits the processor's cache."""


def backbone_features(
    embedder: Embedder, collection: Collection, preprocessing: Preprocessing, *, workers: int = 0
) -> Tensor:
    """Return features (N, F) of the centre crops, from the cache if they are there.

    The key covers items, preprocessing, mirroring, the kind of device and every weight of the
    backbone.
    """
    file, features = _cache_file(embedder, collection, preprocessing), None
    # The key can't cover the pixels of a dataset, or what a module from Python does.
    is_kept = collection.kind != "dataset" and embedder.backbone.name != OWN
    if is_kept:
        like = torch.empty(len(collection), embedder.backbone.features, device="meta")
        features = read_tensor(file, like=like)
    if not any_true(features is None)[0]:
        assert features is not None
        return features
    backbone = for_inference(embedder).backbone
    accelerate_for(backbone, len(collection))
    with console.progress("computing features once", len(collection)) as progress:
        features = run_over(backbone, collection, preprocessing, workers=workers, progress=progress)
    if is_kept and make_room(features.nbytes):
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
    """Use one torch thread, so that onnxruntime has the cores: waiting torch threads spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def accelerate_for(backbone: Backbone, count: int) -> None:
    """Let onnxruntime run a backbone on `count` pictures, if that saves time.

    Only the number decides, so that the same command gives the same bits again.
    """
    if count < WORTH_EXPORT:
        return

    def write(file: Path, graph: bytes) -> None:
        if make_room(len(graph)):
            try_write(file, lambda out: out.write(graph))

    if accelerate(backbone, cache_directory(), write):
        console.say(f"{backbone.name} runs in onnxruntime (NOFUSS_RUNTIME=torch: in torch)")


def _cache_file(embedder: Embedder, collection: Collection, preprocessing: Preprocessing) -> Path:
    def parts() -> Iterator[Bytes]:
        yield f"{collection.fingerprint()} {preprocessing} {torch.__version__}".encode()
        if (kind := device_of(embedder).type) != "cpu":  # a GPU may round its products
            yield kind.encode()
        if embedder.backbone.mirror:
            yield b"mirrored"
        for path in collection.paths:  # other pixels in a file of the same size change its time
            yield f"{path.stat().st_mtime_ns} ".encode()
        yield from tensor_parts(embedder.backbone.state_dict())

    return cache_directory() / f"features-{digest_of(parts())}.safetensors"
