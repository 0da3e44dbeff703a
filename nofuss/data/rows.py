"""What the rows of a table of pictures have in common, in Parquet and in Arrow files.

The label is a column of numbers or names; the names of the classes are in the description that
Hugging Face `datasets` writes. A column `split`, or train and test in the names of the files, split
the data.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nofuss.data.collection import TEST, TRAIN, Collection, first_five, printable
from nofuss.data.labelling import sides_by_name
from nofuss.data.table import by_number_or_name
from nofuss.errors import DataError
from nofuss.files.atomic import memory

LABEL_COLUMNS = (
    "label",
    "labels",
    "class",
    "class_name",
    "category",
    "target",
    "fine_label",
    "cls",
)
LARGEST_TEXT = 2**16
"""Characters of a label or a name."""
BYTES_PER_ROW = 512
"""What a row takes here: its path, label and side."""


class FileRows(NamedTuple):
    """What a file holds: paths of pictures, their labels and sides ("" where there are none)."""

    paths: list[Path]
    labels: list[str]
    sides: list[str]


def collection_of(
    rows: Sequence[FileRows], files: Sequence[Path], root: Path, name: str, layout: str
) -> Collection:
    """Join the rows of all files; a split is a column, or in the names of the files."""
    paths = [path for each in rows for path in each.paths]
    labels = [label for each in rows for label in each.labels]
    sides = [side for each in rows for side in each.sides]
    if not paths:
        raise DataError(f"{printable(name)} has no rows with a picture")
    by_name = sides_by_name(files)
    if not any(sides) and by_name is not None:
        pairs = zip(rows, by_name, strict=True)
        sides = [side for each, side in pairs for _ in each.paths]
    if any(labels) and not all(labels):
        rows_without = [f"row {i}" for i, label in enumerate(labels) if not label]
        raise DataError(f"{printable(name)} has rows without a label: {first_five(rows_without)}")
    compact, names = by_number_or_name(labels)
    has_split = all(sides) and {TRAIN, TEST} <= set(sides)
    return Collection(
        name=printable(name),
        layout=layout,
        kind="pictures",
        paths=paths,
        root=root,
        labels=compact if any(labels) else None,
        class_names=tuple(map(printable, names)) if any(labels) else (),
        split=np.array(sides) if has_split else None,
    )


def check_count(count: int, size: int) -> None:
    """Refuse more rows than the bytes of their file could hold, or than fit into memory.

    A few bytes of Parquet can stand for billions of equal rows.
    """
    if not 0 <= count <= min(size, memory() // BYTES_PER_ROW):
        raise ValueError(f"{count:,} rows in {size:,} bytes")


def values_of(array: Any, known: dict[str, str]) -> list[Any]:
    """Return the values of an Arrow array of numbers or text; ValueError for other types.

    Lists and views may use the same bytes for every row, so that a small file takes all memory.
    known: texts of other arrays; equal ones are stored once.
    """
    import pyarrow.types as types

    kind = array.type
    if types.is_dictionary(kind):
        words = values_of(array.dictionary, known)
        return [None if code is None else words[code] for code in array.indices.to_pylist()]
    plain = (types.is_primitive, types.is_decimal, types.is_string, types.is_large_string)
    if not any(is_kind(kind) for is_kind in (*plain, types.is_null)):
        raise ValueError(f"labels or names are of type {kind}; expected numbers or text")
    values: list[Any] = array.to_pylist()
    for row, value in enumerate(values):
        if isinstance(value, str):
            if len(value) > LARGEST_TEXT:
                raise ValueError(f"a label or name of {len(value):,} characters")
            values[row] = known.setdefault(value, value)
    return values


def labels_in(values: list[Any], column: str | None, features: dict[str, Any]) -> list[str]:
    """Return labels as text; class names in place of numbers where there are."""
    feature = features.get(column) if column else None
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list):
        return ["" if value is None else str(value) for value in values]
    if any(not isinstance(v, int) or not 0 <= v < len(names) for v in values if v is not None):
        raise ValueError(f"{column} has numbers beyond its {len(names):,} class names")
    return ["" if value is None else str(names[value]) for value in values]


def label_column(schema: Any, features: dict[str, Any]) -> str | None:
    """Return the column of labels: the one with class names, else one with a usual name."""
    named = [n for n, f in features.items() if isinstance(f, dict) and f.get("names")]
    usual = [name for name in LABEL_COLUMNS if name in schema.names]
    both = [name for name in usual if name in named]
    return next((name for name in (*both, *usual, *named) if name in schema.names), None)


def need_pyarrow(path: Path) -> None:
    """Raise DataError, with the cure, where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{printable(path)} needs pyarrow; pip install 'nofuss[parquet]'"
        ) from error
