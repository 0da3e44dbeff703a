"""Training in TensorBoard: scalars by step and epoch, scores, and embeddings to walk around in.

DIR/NAME holds one run, so that several runs of one DIR lie over each other. The projector shows
items of the unseen classes (without any, training items) with their classes and thumbnails.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from nofuss.data.collection import Collection
from nofuss.data.decode import shrunk_item
from nofuss.errors import UsageError, visible
from nofuss.run.embeddings import RunEmbeddings
from nofuss.run.events import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_ITEMS = 5000
"""Items in the projector; the browser computes t-SNE of them."""
SIDE = 48
"""Side of a thumbnail: 5,000 make a picture of 3,408 pixels, and the projector takes 8,192."""


class TensorBoard:
    """Writes events of training, then embeddings, for TensorBoard; `close` flushes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = _writer_type()
        self._writer: SummaryWriter | None = None
        self._settings: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        """Write the values of an event as scalars."""
        if event.kind == "start":
            self._settings = dict(event.values)
            return
        if self._writer is None:
            where = self.folder / event.run.resolve().name
            # A resumed run repeats the steps after its checkpoint: the first of them replaces all.
            # One that only had to be scored repeats none.
            again = event.step + (event.kind == "end")
            self._writer = self._open(str(where), purge_step=again)
            self._writer.add_text("settings", _table(self._settings))
        group = {"step": "step", "epoch": "epoch", "end": "scores"}[event.kind]
        for name, value in event.values.items():
            if name != "epoch":
                self._writer.add_scalar(f"{group}/{_tag(name)}", value, event.step)

    def embeddings(self, kept: RunEmbeddings, collection: Collection) -> None:
        """Write embeddings with classes, names and thumbnails for the projector."""
        vectors, rows = (kept.test, kept.test_rows)
        if not len(vectors):
            vectors, rows = kept.sample, kept.sample_rows
        if self._writer is None or not len(vectors):
            return
        chosen = np.linspace(0, len(rows) - 1, min(MOST_ITEMS, len(rows))).astype(np.int64)
        shown = rows[chosen]
        self._writer.add_embedding(
            torch.from_numpy(vectors[chosen]),
            metadata=[[_class_of(collection, i), visible(collection.names[i])] for i in shown],
            metadata_header=["class", "item"],
            label_img=_sprites(collection, shown) if collection.has_pictures else None,
            tag="embeddings",
        )

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()


def _writer_type() -> "type[SummaryWriter]":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "--tensorboard needs another package: pip install 'nofuss[tensorboard]'"
        ) from None
    return SummaryWriter


def _tag(name: str) -> str:
    """Return the name with the characters that TensorBoard allows."""
    return re.sub(r"[^\w/.-]+", "_", name.replace("@", "_at_"))


def _table(settings: dict[str, Any]) -> str:
    rows = [f"| {name} | {visible(str(value))} |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _class_of(collection: Collection, row: int) -> str:
    labels = collection.labels
    return "" if labels is None else visible(str(collection.class_names[labels[row]]))


def _sprites(collection: Collection, rows: NDArray[np.int64]) -> torch.Tensor:
    """Return thumbnails (N, 3, SIDE, SIDE) between 0 and 1; gray where a file can't be read."""
    found = np.full((len(rows), SIDE, SIDE, 3), 128, np.uint8)
    for place, row in zip(found, rows.tolist(), strict=True):
        small = shrunk_item(collection, row, side=SIDE)
        if small is not None:
            square = Image.new("RGB", (SIDE, SIDE), "white")
            image = small.convert("RGB")
            square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
            place[:] = np.asarray(square)
    return torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255
