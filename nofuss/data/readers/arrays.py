"""Arrays in one file, `.npz` or `.safetensors`: vectors (N, D) or pictures, and labels.

    vectors | embeddings | features | X | x | images | data     the items
    labels | y | targets                                        (N,), numbers or words
    classes | class_names                                       (C,), optional; or JSON in metadata
    split                                                       (N,) of train and test, optional
    triplets                                                    (T, 3) of rows, instead of labels
    pairs                                                       (M, 3) of two rows and 1 if alike

Pickled objects are refused.
"""

import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nofuss.data.collection import (
    TEST,
    TRAIN,
    Collection,
    compact_labels,
    first_five,
    printable,
    reading,
    to_bytes,
)
from nofuss.data.readers.table import check_pairs
from nofuss.data.triplets import Comparisons
from nofuss.errors import DataError
from nofuss.files import check_regular, memory, parse_json

ITEMS = ("vectors", "embeddings", "features", "X", "x", "images", "data")
LABELS = ("labels", "y", "targets")
NAMES = ("classes", "class_names")

Arrays = dict[str, NDArray[Any]]


def open_arrays(path: Path, *, check_values: bool = True) -> Collection:
    """Read the items and labels of an `.npz` or `.safetensors` file.

    check_values: refuse vectors that training can't use; `nofuss doctor` lists them instead.
    """
    with reading(path, "file of arrays"):
        arrays = _load(path)
    layout = f"arrays in {printable(path.name)}"
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
    items, remarks = _as_items(arrays[key], key), list[str]()
    if check_values and items.ndim == 2:
        check_vectors(items, name=key)
    more: dict[str, Any] = {}
    if kind := _first(arrays, ("triplets", "pairs")):
        more["comparisons"] = _as_comparisons(arrays[kind], kind, len(items))
        if {"triplets", "pairs"} <= arrays.keys():
            remarks.append("pairs are not used beside triplets")
    if labels_key := _first(arrays, LABELS):
        raw = _as_labels(arrays[labels_key], labels_key, len(items))
        more["labels"], values = compact_labels(raw)
        if raw.dtype.kind in "iu" and (values[0] < 0 or values[-1] >= len(values)):
            remarks.append(f"labels {values[0]}…{values[-1]} renumbered to 0…{len(values) - 1}")
        more["class_names"] = _class_names(values, arrays.get(_first(arrays, NAMES) or ""))
        more["split"] = _split(arrays, raw)
    return Collection(name=name, layout=layout, array=items, remarks=tuple(remarks), **more)


def _load(path: Path) -> Arrays:
    check_regular(path, limit=memory())
    if path.suffix.lower() == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:  # torch knows bfloat16, numpy does not
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            names = (file.metadata() or {}).get("classes", "")
        found = {k: (t.float() if t.is_floating_point() else t).numpy() for k, t in tensors.items()}
        with suppress(ValueError):  # there are none, or another program wrote them
            found.setdefault("classes", np.array(parse_json(names.encode())))
        return found
    if not zipfile.is_zipfile(path):
        raise ValueError("not a zip archive as np.savez writes")
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except ValueError as error:
        if "allow_pickle" in str(error):
            reason = "it holds Python objects; save labels as text: labels.astype(str)"
            raise ValueError(reason) from error
        raise


def _first(arrays: Arrays, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in arrays), None)


def check_vectors(vectors: NDArray[np.float32], *, name: str) -> None:
    """Refuse vectors (N, D) with NaN or infinity."""
    _check_rows(is_finite(vectors), f"{name} has NaN or infinite values", "; drop or fix them")


def is_finite(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return for each row (N, D) whether all of its values are finite."""
    return np.asarray(np.isfinite(vectors).all(axis=1))


def _check_rows(is_good: ArrayLike, complaint: str, cure: str = "") -> None:
    """Raise DataError with the first of the bad rows, if there are any."""
    if not np.all(is_good):
        bad = [str(row) for row in np.flatnonzero(np.logical_not(is_good))]
        rows = first_five(bad).replace(";", ",")
        raise DataError(f"{complaint} in rows {rows}{cure}")


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
    """Return labels (N,) as whole numbers or words."""
    got = f"{key} is {labels.dtype} of shape {labels.shape}"
    if labels.size != count or labels.ndim > 2 or max(labels.shape, default=0) != count:
        raise DataError(f"{got} for {count:,} items; expected one label per item")
    labels = labels.reshape(-1)
    if labels.dtype.kind in "iuUS":
        return labels
    if labels.dtype.kind == "f" and (labels == labels.round()).all():
        if np.abs(labels).max() > 2.0 ** (1 + np.finfo(labels.dtype).nmant):
            raise DataError(f"{key} has numbers that {labels.dtype} can't distinguish; give int64")
        return labels.astype(np.int64)
    if labels.dtype.kind == "b":
        return labels.astype(np.int64)
    raise DataError(f"{got}; expected whole numbers or words")


def _class_names(values: NDArray[Any], names: NDArray[Any] | None) -> tuple[str, ...]:
    """Return names by label; the label itself where the list of names does not fit."""
    fits = names is not None and names.ndim == 1 and values.dtype.kind in "iu"
    if names is not None and fits and values[0] >= 0 and values[-1] < len(names):
        values = names[values]
    found = (v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values)
    return tuple(to_bytes(name).decode("utf-8", "backslashreplace") for name in found)


def _split(arrays: Arrays, labels: NDArray[Any]) -> NDArray[np.str_] | None:
    if "split" not in arrays:
        return None
    split = arrays["split"]
    if split.shape != labels.shape or split.dtype.kind not in "US":
        raise DataError("split must have one entry per item, train or test")
    if split.dtype.kind == "S":
        split = np.char.decode(split, "latin-1")
    split = np.char.lower(split)
    _check_rows(np.isin(split, (TRAIN, TEST)), "split is neither train nor test")
    return split


def _as_comparisons(rows: NDArray[Any], kind: Any, count: int) -> Comparisons:
    """Return triplets or pairs; DataError for other shapes, and items that do not exist."""
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iu":
        raise DataError(f"{kind} has shape {rows.shape}; expected (T, 3) whole numbers")
    if not len(rows):
        raise DataError(f"{kind} is empty, so there is nothing to learn from; expected (T, 3) rows")
    comparisons = Comparisons(kind, rows.astype(np.int64))
    is_inside = np.isin(comparisons.items, np.arange(count)).all(axis=1)
    _check_rows(is_inside, f"{kind} name items beyond 0…{count - 1}")
    if kind == "pairs":
        _check_rows(np.isin(rows[:, 2], (0, 1)), "the third column of pairs is neither 0 nor 1")
        check_pairs(comparisons.rows, kind)
    return comparisons
