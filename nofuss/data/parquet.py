"""Parquet: pictures as a column of bytes, as `datasets` stores an image, or as a column of paths.

Needs pyarrow (extra `parquet`). Pictures are read from their row when they are needed: see
`files/parts.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nofuss.data.collection import Collection, first_five, printable
from nofuss.data.labelling import SPLIT_WORDS
from nofuss.data.rows import (
    FileRows,
    check_count,
    collection_of,
    label_column,
    labels_in,
    need_pyarrow,
    values_of,
)
from nofuss.data.table import SPLITS, existing
from nofuss.errors import DataError
from nofuss.files.atomic import READ_LIMIT, check_regular, parse_json
from nofuss.files.parts import Part, part_path, picture_column

PATH_COLUMNS = (
    *("path", "file_name", "filename", "filepath", "file_path", "image_path", "file"),
    *("image", "img", "picture"),
)


def open_parquet(files: Sequence[Path], root: Path) -> Collection:
    """Open the pictures in Parquet files, in order."""
    need_pyarrow(files[0])
    name = files[0].stem if len(files) == 1 else root.name
    count = f", {len(files):,} files" if len(files) > 1 else ""
    return collection_of([_parquet_rows(f) for f in files], files, root, name, f"Parquet{count}")


def _parquet_rows(file: Path) -> FileRows:
    """Read all columns but the pictures, which are read when they are needed."""
    from pyarrow import parquet

    try:
        size = check_regular(file, limit=2**62)
        with parquet.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            features = _features(schema.metadata)
            picture, place = picture_column(schema), _path_column(schema)
            label = label_column(schema, features)
            count = opened.metadata.num_rows
            check_count(count, size)
            without_bytes = picture is not None and _without_bytes(opened, picture)
            side = "split" if "split" in schema.names else None
            named = picture is not None and place is None and _has_path(schema, picture)
            labels = labels_in(_values(opened, label, count), label, features)
            sides = _sides(_values(opened, side, count), file) if side else [""] * count
            names = _values(opened, f"{picture}.path" if named else None, count)
            places = _values(opened, None if picture else place, count)
    except DataError:
        raise
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"can't read {printable(file)}: {reason}") from error
    except Exception as error:  # pyarrow has many, and a file from outside may raise any
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{printable(file)} is not a readable Parquet file: {reason}") from error
    if picture is not None and not without_bytes:
        paths = [part_path(Part(file, row), str(name or "")) for row, name in enumerate(names)]
        return FileRows(paths, labels, sides)
    if without_bytes:
        return FileRows(_existing(file, names), labels, sides)
    if place is None:
        shown = printable(", ".join(schema.names))
        raise DataError(
            f"{printable(file)} has the columns {shown}; expected pictures as bytes in a column "
            "like image, or their paths in a column like path"
        )
    return FileRows(_existing(file, places), labels, sides)


def _existing(file: Path, values: Sequence[Any]) -> list[Path]:
    """Return the files that a column names, relative to the table; all of them must exist."""
    paths, complaints = list[Path](), list[str]()
    for row, value in enumerate(values):
        try:
            if not isinstance(value, str):
                raise ValueError("no path")
            paths.append(existing(file.parent, value))
        except ValueError as error:
            complaints.append(f"row {row}: {error}")
    if complaints:
        name = printable(file.name)
        raise DataError(f"{name} has rows that can't be used: {first_five(complaints)}")
    return paths


def _sides(values: Sequence[Any], file: Path) -> list[str]:
    words = [str(value).strip().lower() for value in values]
    sides = SPLITS | SPLIT_WORDS
    if unknown := sorted({word for word in words if word not in sides}):
        shown = printable(", ".join(unknown[:5]))
        raise DataError(f"{printable(file)}: split has {shown}; expected train and test")
    return [sides[word] for word in words]


def _values(opened: Any, column: str | None, count: int) -> list[Any]:
    """Return the values of a column, a row at a time; None for each row without one.

    A text that is stored once can stand for a million rows, and pyarrow would copy it for each. A
    column of Arrow's type dictionary is read as one, without copies.
    """
    import pyarrow.types as types

    if column is None:
        return [None] * count
    is_coded = types.is_dictionary(opened.schema_arrow.field(column.partition(".")[0]).type)
    known, values = dict[str, str](), list[Any]()
    at_once = 2**16 if is_coded else 1
    for batch in opened.iter_batches(at_once, columns=[column], use_threads=False):
        array = batch.column(0)
        values += values_of(array.field("path") if types.is_struct(array.type) else array, known)
    if len(values) != count or sum(map(len, known)) > READ_LIMIT:
        raise ValueError(f"{len(values):,} rows of {column}, where {count:,} are stated")
    return values


def _without_bytes(opened: Any, picture: str) -> bool:
    """Return whether images are stored as paths only, as `to_parquet` does for files.

    By the cells, not by the statistics in the metadata: pyarrow ends the process on forged ones.
    """
    import pyarrow.types as types

    if not types.is_struct(opened.schema_arrow.field(picture).type):
        return False
    batches = opened.iter_batches(1, columns=[f"{picture}.bytes"], use_threads=False)
    return all(batch.column(0).field("bytes").null_count for batch in batches)


def _has_path(schema: Any, picture: str) -> bool:
    kind = schema.field(picture).type
    return hasattr(kind, "get_field_index") and kind.get_field_index("path") >= 0


def _path_column(schema: Any) -> str | None:
    texts = {f.name for f in schema if str(f.type) in ("string", "large_string")}
    return next((name for name in PATH_COLUMNS if name in texts), None)


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """Return what `datasets` wrote of the columns into a Parquet file; empty without."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}
