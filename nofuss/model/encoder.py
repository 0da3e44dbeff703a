"""A trained model with its preprocessing: pictures or vectors in, embeddings out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode_resized, in_mode, resized
from nofuss.data.loader import AHEAD, ahead
from nofuss.data.sampling import Indices
from nofuss.data.transforms import center_views
from nofuss.distributed.device import choose_device
from nofuss.errors import DataError, HubError, RunError, command
from nofuss.geometry import as_tensor, normalize
from nofuss.model.backbones import Backbone, joined
from nofuss.model.embedder import Embedder, embed_features, for_inference
from nofuss.model.features import Computed, batch_size, extract, features_of
from nofuss.model.hub import fetch, is_address, parse_address
from nofuss.model.manifest import map_in_force
from nofuss.model.onnx import accelerate
from nofuss.model.saved import load_model
from nofuss.model.whitening import Affine
from nofuss.progress import Progress, silent


class Encoded(NamedTuple):
    """What a model makes of items, by one pass through it."""

    vectors: Tensor
    """(N, dim) unit embeddings."""
    features: Tensor
    """(N, F) what the head was given, before its root: scaled to length 1, too."""
    unreadable: Mapping[int, PictureError] = MappingProxyType({})
    """Row of each picture that can't be decoded, with the reason; its numbers mean nothing."""

    @property
    def readable(self) -> Indices:
        """Return the rows that mean something, as `Collection.subset` takes them."""
        return np.setdiff1d(np.arange(len(self.vectors)), list(self.unreadable))


class Encoder:
    """A trained model, opened by `nofuss.load`: `embed` returns unit vectors for search.

    embedder: the network, which is copied for inference; its backbone says how pictures become its
        inputs.
    cached: read the features of collections that the cache has, and add to them.
    source: where the model was loaded from. digest: its checksum.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        class_names: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
        cached: bool = False,
        source: str = "",
        digest: str = "",
    ) -> None:
        self.embedder = for_inference(embedder)
        self.cached = cached
        self.class_names = tuple(class_names)
        self.extra = extra or {}
        self.source, self.digest = source, digest

    @property
    def preprocessing(self) -> tuple[Preprocessing, ...]:
        """How a picture becomes an input of each network; empty for vectors."""
        found = (part.preprocessing for part in self.embedder.backbone.parts)
        return tuple(each for each in found if each is not None)

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.embedder.dim

    def embed(self, items: Any) -> Tensor:
        """Return unit embeddings (N, dim) of paths, PIL pictures, uint8 arrays, or vectors.

        A tuple of arrays is one picture, as each of several networks takes it.
        """
        return self.encode(items).vectors

    def encode(self, items: Any) -> Encoded:
        """Return unit embeddings and features of what `embed` takes."""
        if not self.preprocessing:
            return self._encoded(_vectors(items, self.embedder.backbone.channels))
        is_single = isinstance(items, np.ndarray) and items.ndim == 3 and items.shape[2] == 3
        if is_single or isinstance(items, str | Path | Image.Image):
            raise ValueError("embed takes several pictures; put a single one into a list")
        backbone = self.embedder.backbone
        accelerate(backbone, len(items) * backbone.views)
        found = []
        for i, part in enumerate(backbone.parts):
            of_part = [item[i] if isinstance(item, tuple) else item for item in items]
            found.append(_features(part, of_part))
        return self._encoded(joined(found))

    def embed_collection(self, collection: Collection, *, progress: Progress = silent) -> Tensor:
        """Return unit embeddings (N, dim) of a collection in its order.

        A picture that can't be decoded is an error.
        """
        features = self._features_of(collection, progress=progress).values
        return normalize(embed_features(self.embedder, features))

    def encode_collection(
        self, collection: Collection, *, skip_unreadable: bool = False
    ) -> Encoded:
        """Return unit embeddings and features of a collection in its order.

        skip_unreadable: report pictures that can't be decoded; without it the first is an error.
        """
        found = self._features_of(collection, skip_unreadable=skip_unreadable)
        return self._encoded(found.values, found.unreadable)

    def _features_of(self, collection: Collection, **options: Any) -> Computed:
        check_fits(collection, self.embedder.backbone)
        return features_of(self.embedder.backbone, collection, cached=self.cached, **options)

    def _encoded(
        self, features: Tensor, unreadable: Mapping[int, PictureError] = MappingProxyType({})
    ) -> Encoded:
        vectors = normalize(embed_features(self.embedder, features))
        return Encoded(vectors, normalize(features), unreadable)


def _features(network: Backbone, items: Sequence[Any]) -> Tensor:
    """Return one network's features of pictures."""
    look, batch = network.preprocessing, batch_size(network)
    assert look is not None
    chunks = [items[i : i + batch] for i in range(0, len(items), batch)]

    def views(chunk: Sequence[Any]) -> Tensor:
        return center_views([_picture(item, look) for item in chunk], look)

    # Pictures are decoded while the last ones are computed.
    loaded = ahead(views, chunks, int(len(chunks) > 1), waiting=AHEAD)
    return extract(network, loaded, count=len(items))


def _picture(item: Any, look: Preprocessing) -> NDArray[np.uint8]:
    if isinstance(item, str | Path):
        return decode_resized(Path(item), look)
    if isinstance(item, Image.Image):
        image = ImageOps.exif_transpose(item)  # upright, as for files
    else:
        image = _from_array(np.asarray(item))
    return resized(in_mode(image, look.mode), look)


def check_fits(collection: Collection, backbone: Backbone) -> None:
    """Refuse vectors for a model of pictures, pictures for one of vectors, and other widths."""
    vectors, width = collection.vectors, backbone.channels
    if (vectors is None) == (backbone.preprocessing is None):
        holds, takes = ("pictures", "vectors") if vectors is None else ("vectors", "pictures")
        raise DataError(f"{collection.name} holds {holds}, but the model takes {takes}")
    if vectors is not None and vectors.shape[1] != width:
        raise DataError(
            f"{collection.name} has vectors of {vectors.shape[1]} dimensions, but the model takes "
            f"{width}"
        )


def load(
    path: str | Path,
    *,
    device: str = "auto",
    backbone: nn.Module | None = None,
    feedback: bool = True,
) -> Encoder:
    """Open a run directory, its model/ folder, or a model of the Hub: hf://user/name[@revision].

    A model of the Hub is pinned: `encoder.source` is its address with the commit.

    device: "auto" is a GPU if there is one, which computes in the precision of training; others
    compute in float32. backbone: the module that the run was trained on, where it came from Python
    (`nofuss.train(…, backbone=module)`). feedback: False is the model of a run as it was trained,
    without what it was taught on the page.
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
    try:
        embedder, class_names, extra, digest = load_model(model, backbone=backbone)
    except RunError as error:
        if not is_address(path):
            raise
        cached = folder.parents[2]  # …/models--user--name/snapshots/COMMIT/model
        raise HubError(f"{error}, or delete {cached} and load it again") from None
    if feedback:
        fold_feedback(embedder, model.parent, digest)
    where = choose_device(device)
    if where.type != "cuda":  # half precision is slower there, and the weights are float32
        embedder.backbone.precision = "fp32"
    return Encoder(
        embedder.to(where),
        class_names=class_names,
        extra=extra,
        cached=True,
        source=source,
        digest=digest,
    )


def fold_feedback(embedder: Embedder, run: Path, digest: str) -> None:
    """Make what a run was taught on the page part of the head of its model."""
    if (matrix := map_in_force(run, digest, embedder.dim)) is not None:
        mapped = (matrix @ part.detach().double() for part in embedder.head.parameters())
        embedder.set_head(Affine(*(part.float() for part in mapped)), root=embedder.root)


def _from_array(pixels: NDArray[Any]) -> Image.Image:
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
