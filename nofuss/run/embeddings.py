"""The embeddings that a run keeps, so that report and page need not compute them again.

RUN/embeddings.safetensors: unit vectors of the test items and of a sample of the training
items, their rows in the collection, the proxies, and p(x) of the sample.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nofuss.errors import RunError
from nofuss.files import array_bytes, load_tensors, tensor_bytes, write_file

FILE = "embeddings.safetensors"
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class RunEmbeddings:
    """Unit embeddings of both sides; rows count in the collection with this fingerprint."""

    fingerprint: str
    test: Floats
    """(N, D), empty without test classes."""
    test_rows: Rows
    sample: Floats
    """(M, D) of training items: whole classes, drawn at random."""
    sample_rows: Rows
    proxies: Floats
    """(P, D) directions; empty for losses over instances."""
    assignment: Rows
    """(M,) the row of p(x) for each item of the sample; empty without proxies."""
    scale: float | None = None
    """2·N_x·N_p of the loss; None if norms are free."""
    seen: bool = False
    """The test items are all items, also trained on; their scores are by folds."""

    def save(self, run: Path) -> None:
        """Write the file of the run."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        about = {"fingerprint": self.fingerprint, "scale": self.scale, "seen": self.seen}
        about["checksum"] = _checksum(about, arrays)
        write_file(run / FILE, tensor_bytes(arrays, about))


_ARRAYS = ("test", "test_rows", "sample", "sample_rows", "proxies", "assignment")


def load_embeddings(run: Path) -> RunEmbeddings | None:
    """Read the embeddings that training kept; None if the run has no such file."""
    file = run / FILE
    if not file.is_file():
        return None
    try:
        tensors, about = load_tensors(file)
        arrays: dict[str, Any] = {name: tensors[name].numpy() for name in _ARRAYS}
        if about.pop("checksum") != _checksum(about, arrays):
            raise ValueError("its checksum differs")
        kept = RunEmbeddings(**about, **arrays)
        _check(kept)
        return kept
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{file} is damaged ({reason}); delete it or train again") from None


def _check(kept: RunEmbeddings) -> None:
    """Raise ValueError if the parts don't fit each other; the checksum only excludes damage."""
    vectors = {"test": kept.test, "sample": kept.sample, "proxies": kept.proxies}
    for name, array in vectors.items():
        if array.dtype != np.float32 or array.ndim != 2 or array.shape[1] != kept.test.shape[1]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected float32 (N, D)")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity")
    assigned = len(kept.sample) if len(kept.proxies) else 0
    rows = {"test_rows": len(kept.test), "sample_rows": len(kept.sample), "assignment": assigned}
    for name, count in rows.items():
        array = getattr(kept, name)
        if array.dtype != np.int64 or array.shape != (count,) or array.min(initial=0) < 0:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected int64 ({count},)")
    if kept.assignment.max(initial=-1) >= len(kept.proxies):
        raise ValueError("assignment names proxies that do not exist")
    if type(kept.fingerprint) is not str:
        raise ValueError("its fingerprint is not a string")
    if kept.scale is not None and not (type(kept.scale) is float and np.isfinite(kept.scale)):
        raise ValueError(f"its scale is {kept.scale!r:.20}")


def _checksum(about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> str:
    made = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in _ARRAYS:
        made.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        made.update(array_bytes(arrays[name]))
    return made.hexdigest()


def without_sample(fingerprint: str, dim: int) -> RunEmbeddings:
    """Return the embeddings of a run that kept none: neither items nor proxies."""
    vectors, rows = np.empty((0, dim), np.float32), np.empty(0, np.int64)
    return RunEmbeddings(fingerprint, vectors, rows, vectors, rows, vectors, rows)


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
