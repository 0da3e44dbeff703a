"""Embedding photographs with a loaded model, compared with a plain loop in eager torch.

Pictures: JPEGs below the folder that $NOFUSS_DATA names; skipped without it. Each time a model is
loaded and embeds, with the graph that training leaves in the cache and without it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path

import torch
from PIL import Image

import nofuss
from benchmarks.timing import Growth, Row, interleaved
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.encoder import Encoder
from nofuss.model.onnx import cache_graph
from nofuss.model.saved import save_model

BATCH = 16
"""Larger ones took longer in eager torch, smaller ones as long."""


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure `nofuss.load(RUN).embed(files)` in torch and in onnxruntime beside the plain loop."""
    files = photographs(64 if quick else 384)
    if not files:
        print("embedding: $NOFUSS_DATA names no folder with JPEGs; skipped")
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["NOFUSS_CACHE"] = f"{scratch}/cache"
        embedder = build_embedder("efficientnet-lite0", dim=64).eval()
        save_model(Path(scratch, "model"), embedder)
        cache_graph(embedder)
        timed: dict[str, Callable[[], object]] = {
            "bare": lambda: plain(embedder, files),
            "onnx": lambda: nofuss.load(Path(scratch, "model")).embed(files),
            "torch": lambda: without_graph(lambda: nofuss.load(Path(scratch, "model")), files),
            "first": lambda: nofuss.load(Path(scratch, "model")).embed(files[:1]),
        }
        seconds = interleaved(timed, repeats=3)
    case, limit = f"{len(files)} photographs, EfficientNet-Lite0, 224 px", seconds["bare"]
    yield Row("embedding", case, "limit: a plain loop in eager torch", limit, limit, nan)
    name = "nofuss.load(RUN).embed(files), the graph in the cache"
    yield Row("embedding", case, name, seconds["onnx"], limit, nan, bar=1 / 1.8)
    yield Row("embedding", case, "the same without a graph", seconds["torch"], limit, nan, bar=1.05)
    yield Row("embedding", case, "load, and embed one", seconds["first"], limit, nan)


def without_graph(load: Callable[[], Encoder], files: list[Path]) -> torch.Tensor:
    """Return embeddings that torch computes, as where the cache has no graph."""
    os.environ["NOFUSS_RUNTIME"] = "torch"
    try:
        return load().embed(files)
    finally:
        del os.environ["NOFUSS_RUNTIME"]


@torch.no_grad()
def plain(embedder: Embedder, files: list[Path]) -> torch.Tensor:
    """Return unit embeddings as someone would write it who has the network and its weights."""
    found = []
    for start in range(0, len(files), BATCH):
        crops = []
        for file in files[start : start + BATCH]:
            image = Image.open(file).convert("RGB")
            scale = 256 / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)))
            left, top = (image.width - 224) // 2, (image.height - 224) // 2
            crop = image.crop((left, top, left + 224, top + 224))
            values = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8)
            crops.append((values.view(224, 224, 3).permute(2, 0, 1).float() - 127) / 128)
        inputs = torch.stack(crops).contiguous(memory_format=torch.channels_last)
        found.append(embedder(inputs))
    return torch.nn.functional.normalize(torch.cat(found))


def photographs(count: int) -> list[Path]:
    """Return that many JPEGs, evenly from all that there are; fewer if there are fewer."""
    named = os.environ.get("NOFUSS_DATA")
    files = sorted(Path(named).rglob("*.jpg")) if named else []
    return files[:: max(1, len(files) // count)][:count]


def growth(*, quick: bool) -> Iterator[Growth]:
    """Return no figure: time grows with the pictures."""
    yield from ()
