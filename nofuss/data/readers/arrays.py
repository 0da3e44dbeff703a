"""Arrays in one file, `.npz` or `.safetensors`: vectors (N, D) or pictures, and labels.

    vectors | embeddings | features | X | x | images | data     the items
    labels | y | targets                                        (N,), numbers or words
    classes | class_names                                       (C,), optional
    split                                                       (N,) of train and test, optional
    is_evaluation_class                                         (C,) of bool, optional
    triplets                                                    (T, 3) of rows, instead of labels
    pairs                                                       (M, 3) of two rows and 1 if alike

Pickled objects are refused.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nofuss.data.collection import (
    TEST,
    TRAIN,
    Collection,
    compact_labels,
    first_five,
    printable,
    to_bytes,
)
from nofuss.data.readers.table import check_pairs
from nofuss.data.triplets import Comparisons
from nofuss.errors import DataError
from nofuss.files import check_regular, memory

ITEMS = ("vectors", "embeddings", "features", "X", "x", "images", "data")
LABELS = ("labels", "y", "targets")
LARGEST = 1e15
"""Largest entry of a vector: millions of squares of it, times 16, still add up in float32."""
NAMES = ("classes", "class_names")

Arrays = dict[str, NDArray[Any]]


def open_arrays(path: Path, *, check_values: bool = True) -> Collection:
    """Read the items and labels of an `.npz` or `.safetensors` file.

    check_values: refuse vectors that training can't use; `nofuss doctor` lists them instead.
    """
    name = printable(path.name)
    try:
        arrays = _load(path)
    except MemoryError as error:
        raise DataError(f"{name} does not fit into memory") from error
    except Exception as error:  # zip, zlib, numpy and safetensors raise many types
        reason = printable(" ".join(str(error).split())) or type(error).__name__
        if "allow_pickle" in reason:
            reason = "it holds Python objects; save labels as text: labels.astype(str)"
        raise DataError(f"{name} can't be read: {reason}") from error
    layout = f"arrays in {name}"
    return from_arrays(arrays, name=path.stem, layout=layout, check_values=check_values)


def from_arrays(
    arrays: Arrays, *, name: str, layout: str = "arrays", check_values: bool = True
) -> Collection:
    """Return the collection of the arrays, which are found by their names."""
    key = _first(arrays, ITEMS)
    if key is None:
        raise DataError(
            f"{name} holds {', '.join(arrays) or 'nothing'}; expected one of {', '.join(ITEMS)}"
        )
    items = _as_items(arrays[key], key)
    if check_values and items.ndim == 2:
        check_vectors(items, name=key)
    labels_key = _first(arrays, LABELS)
    comparisons = None
    if "triplets" in arrays:
        comparisons = Comparisons("triplets", _as_triplets(arrays["triplets"], len(items)))
    elif "pairs" in arrays:
        comparisons = Comparisons("pairs", _as_pairs(arrays["pairs"], len(items)))
    collection = Collection(
        name=name,
        layout=layout,
        array=items,
        comparisons=comparisons,
        notes=("pairs are not used beside triplets",) * ({"triplets", "pairs"} <= {*arrays}),
    )
    if labels_key is None:
        return collection
    raw = _as_labels(arrays[labels_key], labels_key, len(items))
    labels, values = compact_labels(raw)
    notes = collection.notes
    if raw.dtype.kind in "iu" and (values[0] < 0 or values[-1] >= len(values)):
        notes += (f"labels {values[0]}…{values[-1]} renumbered to 0…{len(values) - 1}",)
    names_key = _first(arrays, NAMES)
    return replace(
        collection,
        labels=labels,
        class_names=_class_names(values, None if names_key is None else arrays[names_key]),
        split=_split(arrays, raw),
        notes=notes,
    )


def _load(path: Path) -> Arrays:
    check_regular(path, limit=memory())
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import load_file  # torch knows bfloat16, numpy does not

        tensors = load_file(path)
        return {k: (t.float() if t.is_floating_point() else t).numpy() for k, t in tensors.items()}
    if not zipfile.is_zipfile(path):
        raise ValueError("not a zip archive as np.savez writes")
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > memory():
        raise MemoryError
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _first(arrays: Arrays, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in arrays), None)


def check_vectors(vectors: NDArray[np.float32], *, name: str) -> None:
    """Refuse vectors (N, D) with NaN, infinity, or values whose squares float32 can't hold."""
    bad_rows = np.flatnonzero(~is_finite(vectors))
    if len(bad_rows):
        rows = first_five([str(row) for row in bad_rows]).replace(";", ",")
        raise DataError(f"{name} has NaN or infinite values in rows {rows}; drop or fix them")
    largest = float(np.abs(vectors).max(initial=0))
    if largest > LARGEST or 0 < largest < 1 / LARGEST:
        raise DataError(
            f"{name} reaches {largest:.0e}; the squares of such values are beyond float32: "
            f"divide them by {largest:.0e}"
        )


def is_finite(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return for each row (N, D) whether all of its values are finite."""
    return np.asarray(np.isfinite(vectors).all(axis=1))


def _as_items(items: NDArray[Any], key: str) -> NDArray[Any]:
    """Return vectors as float32 (N, D), pictures as uint8 (N, H, W) or (N, H, W, 3)."""
    got = f"{key} is {items.dtype} of shape {items.shape}"
    if not items.size:
        raise DataError(f"{got}: empty")
    if items.ndim == 2 and items.dtype.kind in "fiu":
        with np.errstate(over="ignore"):  # becomes infinite, and is refused by check_vectors
            return items.astype(np.float32)
    if items.dtype == np.uint8 and items.ndim == 4:
        if items.shape[1] in (1, 3) and items.shape[3] not in (1, 3):
            items = np.ascontiguousarray(items.transpose(0, 2, 3, 1))
        if items.shape[3] == 1:
            items = items[..., 0]
    if items.dtype == np.uint8 and (items.ndim == 3 or (items.ndim == 4 and items.shape[3] == 3)):
        return items
    raise DataError(f"{got}; expected vectors (N, D), or uint8 pictures (N, H, W) or (N, H, W, 3)")


def _as_labels(labels: NDArray[Any], key: str, count: int) -> NDArray[Any]:
    got = f"{key} is {labels.dtype} of shape {labels.shape}"
    if labels.size != count or labels.ndim > 2 or max(labels.shape, default=0) != count:
        raise DataError(f"{got} for {count:,} items; expected one label per item")
    labels = labels.reshape(-1)
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == labels.round()).all():
        exact = 2.0 ** (1 + np.finfo(labels.dtype).nmant)  # larger whole numbers share a float
        if np.abs(labels).max() > min(exact, 2.0**62):
            raise DataError(f"{key} has numbers that {labels.dtype} can't distinguish; give int64")
        labels = labels.astype(np.int64)
    if labels.dtype.kind == "u":  # a label of 2⁶³ and more has no int64
        return labels if labels.max() > np.iinfo(np.int64).max else labels.astype(np.int64)
    if labels.dtype.kind in "bi":
        return labels.astype(np.int64)
    if labels.dtype.kind in "US":
        return labels
    raise DataError(f"{got}; expected whole numbers or words")


def _class_names(values: NDArray[Any], names: NDArray[Any] | None) -> tuple[str, ...]:
    """Return names by label; the label itself where the list of names does not fit."""
    fits = names is not None and names.ndim == 1 and values.dtype.kind in "iu"
    if names is not None and fits and values[0] >= 0 and values[-1] < len(names):
        values = names[values]
    found = (v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values)
    return tuple(to_bytes(name).decode("utf-8", "backslashreplace") for name in found)


def _split(arrays: Arrays, labels: NDArray[Any]) -> NDArray[np.str_] | None:
    if "split" in arrays:
        split = arrays["split"]
        if split.dtype.kind == "S":
            split = np.char.decode(split, "ascii", "replace")
        is_text = split.dtype.kind == "U" and split.shape == labels.shape
        if not is_text or not np.isin(split := np.char.lower(split), (TRAIN, TEST)).all():
            raise DataError("split must have one entry per item, train or test")
        return split
    if "is_evaluation_class" in arrays:
        held_out = arrays["is_evaluation_class"]
        numbers = labels.dtype.kind in "iu" and held_out.ndim == 1 and held_out.dtype == bool
        if not numbers or labels.min() < 0 or labels.max() >= len(held_out):
            raise DataError(
                "is_evaluation_class does not fit the labels; expected one bool per class"
            )
        return np.where(held_out[labels], TEST, TRAIN)
    return None


def _as_triplets(triplets: NDArray[Any], count: int) -> NDArray[np.int64]:
    _check_rows(triplets, triplets, count, "triplets")
    return triplets.astype(np.int64)


def _as_pairs(pairs: NDArray[Any], count: int) -> NDArray[np.int64]:
    _check_rows(pairs, pairs[..., :2] if pairs.ndim else pairs, count, "pairs")
    other = np.flatnonzero(~np.isin(pairs[:, 2], (0, 1)))
    if len(other):
        rows = first_five([str(row) for row in other]).replace(";", ",")
        raise DataError(f"the third column of pairs must be 0 or 1; it is not in rows {rows}")
    return check_pairs(pairs.astype(np.int64), "pairs")


def _check_rows(table: NDArray[Any], items: NDArray[Any], count: int, name: str) -> None:
    """Refuse a table that is not (T, 3), or names items that do not exist."""
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
        raise DataError(f"{name} has shape {table.shape}; expected (T, 3) whole numbers")
    if not len(table):
        raise DataError(f"{name} is empty, so there is nothing to learn from; expected (T, 3) rows")
    outside = np.flatnonzero(((items < 0) | (items >= count)).any(axis=1))
    if len(outside):
        rows = first_five([str(row) for row in outside]).replace(";", ",")
        raise DataError(f"{name} name items beyond 0…{count - 1} in rows {rows}")
