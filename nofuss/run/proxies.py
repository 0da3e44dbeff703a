"""What a run keeps of its training besides model and index: its proxies, for report and map.

RUN/proxies.safetensors: unit proxies, the rows of a sample of the training items, p(x) of these,
and the model they are of. The vectors of the items are in the index.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.errors import RunError, one_line
from nofuss.files import digest, load_tensors, tensor_bytes, tensor_parts, write_file

FILE = "proxies.safetensors"
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class RunProxies:
    """The proxies, and a sample of the training items that shows what they stand for."""

    proxies: Floats
    """(P, D) directions; empty for losses over instances."""
    sample: Rows
    """(M,) rows of training items in the collection: whole classes, drawn at random."""
    assignment: Rows
    """(M,) the row of p(x) for each of them; empty without proxies."""
    scale: float | None = None
    """2·N_x·N_p of the loss; None if norms are free."""

    @classmethod
    def none(cls, dim: int) -> "RunProxies":
        """Return what a run has that kept nothing."""
        rows = np.empty(0, np.int64)
        return cls(np.empty((0, dim), np.float32), rows, rows)

    def save(self, run: Path, model: str) -> None:
        """Write the file of the run."""
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        about = {"model": model, "scale": self.scale}
        about["checksum"] = _checksum(about, tensors)
        write_file(run / FILE, tensor_bytes(tensors, about))


@dataclass(frozen=True)
class RunEmbeddings:
    """Unit vectors of what a report shows; rows count in the collection."""

    test: Floats
    """(N, D), empty without test classes."""
    test_rows: Rows
    sample: Floats
    """(M, D) of the training items in `proxies.sample`."""
    proxies: RunProxies
    seen: bool = False
    """The test items are all items, also trained on; their scores are by folds."""


_ARRAYS = ("proxies", "sample", "assignment")


def load_proxies(run: Path, model: str, dim: int) -> RunProxies:
    """Read what training kept; nothing where the run has no such file, or one of another model."""
    file = run / FILE
    if not file.is_file():
        return RunProxies.none(dim)
    try:
        tensors, about = load_tensors(file)
        if about.pop("checksum") != _checksum(about, tensors):
            raise ValueError("its checksum differs")
        if about["model"] != model:
            return RunProxies.none(dim)
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        kept = RunProxies(**arrays, scale=about["scale"])
        if kept.proxies.shape[1:] != (dim,) or len(kept.assignment) not in (0, len(kept.sample)):
            raise ValueError("its parts do not fit each other")
        return kept
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged ({one_line(error)}); delete it or train again") from None


def _checksum(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    shapes = {name: (str(tensors[name].dtype), *tensors[name].shape) for name in _ARRAYS}
    described = json.dumps([about, shapes], sort_keys=True).encode()
    return digest(described, *tensor_parts({name: tensors[name] for name in _ARRAYS}))


def sample_by_class(labels: Rows, *, items: int = 1500, per_class: int = 60, seed: int = 0) -> Rows:
    """Draw about `items` positions, ascending, as whole classes.

    Whole classes are drawn until the number is reached, so that the neighbours of an item are in
    the sample too. Where no item has a label (−1), single items are drawn.
    """
    random, count = np.random.default_rng(seed), len(labels)
    if labels.max(initial=-1) < 0:
        return np.sort(random.permutation(count)[:items]).astype(np.int64)
    order = random.permutation(count)
    by_class = order[np.argsort(labels[order], kind="stable")]  # shuffled within each class
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    sizes = np.minimum(sizes, per_class)
    chosen: list[Rows] = []
    for c in random.permutation(len(starts)):
        if chosen and sum(map(len, chosen)) + sizes[c] > items:
            break
        chosen.append(by_class[starts[c] : starts[c] + sizes[c]])
    return np.sort(np.concatenate(chosen)).astype(np.int64) if chosen else np.empty(0, np.int64)
