"""A trained model with its preprocessing: pictures or vectors in, embeddings out."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.decode import decode_resized, in_mode, resized
from nofuss.data.transforms import test_views
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError, RunError, command
from nofuss.geometry import as_tensor, normalize
from nofuss.hub.address import is_address, parse_address
from nofuss.hub.download import fetch
from nofuss.model.backbones import Backbone
from nofuss.model.embedder import Embedder
from nofuss.model.features import (
    accelerate_for,
    feature_store,
    features_of,
    one_torch_thread,
    picture_keys,
    read_features,
    run_over,
    write_features,
)
from nofuss.model.inference import extract, for_inference, through_head
from nofuss.model.onnx_backbone import OnnxNetwork
from nofuss.model.saved import load_model
from nofuss.progress import Progress, silent

BATCH = 32


class Encoder:
    """A trained model, opened by `nofuss.load`: `embed` returns unit vectors for search.

    embedder: the network, which is copied for inference; its backbone says how pictures become its
        inputs.
    keep_features: keep the backbone's features of collections, and use those that are kept.
    source: where the model was loaded from.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        class_names: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
        keep_features: bool = False,
        source: str = "",
    ) -> None:
        self._store = feature_store(embedder.backbone) if keep_features else None
        self.embedder = for_inference(embedder)
        self.class_names = tuple(class_names)
        self.extra = extra or {}
        self.source = source

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How a picture becomes an input; None for vectors."""
        return self.embedder.backbone.preprocessing

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.embedder.dim

    def embed(self, items: Any) -> Tensor:
        """Return unit embeddings (N, dim) of paths, PIL pictures, uint8 arrays, or vectors."""
        if self.preprocessing is None:
            vectors = _vectors(items, self.embedder.backbone.channels)
            return _unit(extract(self.embedder, iter([vectors]), count=len(items)))
        is_single = isinstance(items, np.ndarray) and items.ndim == 3 and items.shape[2] == 3
        if is_single or isinstance(items, str | Path | Image.Image):
            raise ValueError("embed takes several pictures; put a single one into a list")
        return _unit(extract(self.embedder, self._views(items), count=len(items)))

    def embed_collection(
        self,
        collection: Collection,
        *,
        num_workers: int = 0,
        progress: Progress = silent,
        unit: bool = True,
    ) -> Tensor:
        """Return embeddings (N, dim) of a collection in its order; raw with `unit=False`."""
        check_fits(collection, self.embedder.backbone)
        if self.preprocessing is not None and self._store is not None:
            features = features_of(
                self.embedder.backbone,
                collection,
                store=self._store,
                num_workers=num_workers,
                progress=progress,
            )
            embeddings = through_head(self.embedder, self.embedder.to_head(features))
        else:
            accelerate_for(self.embedder.backbone, len(collection), progress=progress)
            embeddings = run_over(
                self.embedder, collection, num_workers=num_workers, progress=progress
            )
        check_finite(embeddings)
        return normalize(embeddings) if unit else embeddings

    def kept_features(self, collection: Collection) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return features (N, F) of pictures that are kept, and which of them are."""
        if self._store is None:
            width = self.embedder.backbone.features
            return torch.zeros(len(collection), width), np.zeros(len(collection), dtype=bool)
        return read_features(self._store, picture_keys(collection), self.embedder.backbone.features)

    def embed_features(self, features: Tensor) -> Tensor:
        """Return unit embeddings (N, dim) of features (N, F) of the backbone."""
        return _unit(through_head(self.embedder, self.embedder.to_head(features)))

    def features(self, pictures: Sequence[NDArray[np.uint8]], collection: Collection) -> Tensor:
        """Return features (N, F) of pictures, and keep them as those of the collection."""
        assert self.preprocessing is not None
        backbone = self.embedder.backbone
        in_onnx = isinstance(backbone.network, OnnxNetwork)
        with one_torch_thread() if in_onnx else nullcontext():
            found = extract(backbone, self._views(pictures), count=len(pictures))
        if self._store is not None:
            write_features(self._store, picture_keys(collection), collection, found)
        return found

    def _views(self, items: Sequence[Any]) -> Iterator[Tensor]:
        """Yield pictures as inputs, a batch at a time."""
        assert self.preprocessing is not None
        for i in range(0, len(items), BATCH):
            pictures = [self._picture(item) for item in items[i : i + BATCH]]
            yield test_views(pictures, self.preprocessing)

    def _picture(self, item: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert self.preprocessing is not None
        if isinstance(item, str | Path):
            return decode_resized(Path(item), self.preprocessing)
        if isinstance(item, Image.Image):
            image = ImageOps.exif_transpose(item)  # upright, as for files
        else:
            image = _from_array(np.asarray(item))
        return np.asarray(resized(in_mode(image, self.preprocessing.mode), self.preprocessing))


def _unit(embeddings: Tensor) -> Tensor:
    check_finite(embeddings)
    return normalize(embeddings)


def check_finite(embeddings: Tensor) -> None:
    """Raise RunError if the model gives NaN or infinity."""
    num_bad = (~embeddings.isfinite().all(1)).sum()
    if num_bad:
        raise RunError(
            f"the model gives NaN or infinity for {int(num_bad):,} of {len(embeddings):,} items; "
            "its weights are damaged, or the items differ too much from the training data"
        )


def check_fits(collection: Collection, backbone: Backbone) -> None:
    """Refuse vectors for a model of pictures, pictures for one of vectors, and other widths."""
    vectors, width = collection.kind == "vectors", backbone.channels
    if vectors != (backbone.preprocessing is None):
        takes = "pictures" if vectors else "vectors"
        raise DataError(f"{collection.name} holds {collection.kind}, but the model takes {takes}")
    if vectors and collection.array is not None and collection.array.shape[1] != width:
        raise DataError(
            f"{collection.name} has vectors of {collection.array.shape[1]} dimensions, but the "
            f"model takes {width}"
        )


def load(path: str | Path, *, device: str = "auto", backbone: nn.Module | None = None) -> Encoder:
    """Open a run directory, its model/ folder, or a model of the Hub: hf://user/name[@revision].

    A model of the Hub is pinned: `encoder.source` is its address with the commit.

    device: "auto" is a GPU if there is one, which computes in the precision of training; others
    compute in float32. backbone: the module that the run was trained on, where it came from Python
    (`nofuss.train(…, backbone=module)`).
    """
    source = str(path)
    if is_address(path):
        folder, pinned = fetch(parse_address(path))
        source = str(pinned)
    else:
        folder = Path(path).expanduser()
    if (folder / "config.json").is_file() and not (folder / "model").is_dir():
        raise RunError(
            f"{folder} has no model yet; finish it: "
            f"{command('nofuss', 'train', '--out', folder, '--resume')}"
        )
    model = folder / "model" if (folder / "model").is_dir() else folder
    embedder, class_names, extra = load_model(model, backbone=backbone)
    where = choose_device(device)
    if where.type != "cuda":  # half precision is slower there, and the weights are float32
        embedder.backbone.precision = "fp32"
    return Encoder(
        embedder.to(where),
        class_names=class_names,
        extra=extra,
        keep_features=True,
        source=source,
    )


def _from_array(pixels: np.ndarray[Any, Any]) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)):
        raise ValueError(
            f"got a picture of {pixels.dtype} {pixels.shape}; expected uint8 (H, W) or (H, W, 3)"
        )
    return Image.fromarray(pixels)


def _vectors(items: Any, width: int) -> Tensor:
    x = as_tensor(items) if isinstance(items, np.ndarray) else torch.as_tensor(items)
    x = x.to(torch.float32)
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"got vectors of shape {tuple(x.shape)}; expected (N, {width})")
    return x
