"""Hugging Face `datasets` saved to disk: Arrow files, and JSON that describes them.

Needs pyarrow (extra `parquet`). Arrow files hold a picture's bytes as they are, so only their place
is noted, and they are read from there: see `files/parts.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nofuss.data.arrow_messages import is_compressed
from nofuss.data.collection import Collection, printable
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
from nofuss.errors import DataError
from nofuss.files.atomic import check_regular, parse_json, read_regular
from nofuss.files.parts import Part, part_path, picture_column

COMPRESSED = "it is compressed; save it with datasets' save_to_disk"


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` has saved a dataset, or a dictionary of them, to this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def open_saved_dataset(folder: Path) -> Collection:
    """Open what `save_to_disk` wrote: a dataset, or one for each side of a split."""
    need_pyarrow(folder)
    sides, notes = {folder: ""}, list[str]()
    if (folder / "dataset_dict.json").is_file():
        names = _listed(folder / "dataset_dict.json", "splits", str)
        sides = {folder / name: SPLIT_WORDS[name] for name in names if name in SPLIT_WORDS}
        if not sides:
            raise DataError(
                f"{printable(folder)} has the splits {printable(', '.join(names))}; expected "
                "train and test (or validation)"
            )
        notes += [
            f"split {printable(name)}, beside {' and '.join(each.name for each in sides)}, skipped"
            for name in names
            if name not in SPLIT_WORDS
        ]
    rows, files = list[FileRows](), list[Path]()
    for place, side in sides.items():
        features = _description(place / "dataset_info.json").get("features")
        for entry in _listed(place / "state.json", "_data_files", dict):
            file = place / Path(str(entry.get("filename"))).name
            found = _arrow_rows(file, features if isinstance(features, dict) else {})
            rows.append(found._replace(sides=[side] * len(found.paths)))
            files.append(file)
    if not files:
        raise DataError(f"{printable(folder)} lists no data files in state.json; save it again")
    collection = collection_of(rows, files, folder, folder.name, "Hugging Face dataset on disk")
    return replace(collection, notes=tuple(notes))


def _listed(file: Path, key: str, kind: type) -> list[Any]:
    """Return the list under a key of a JSON file; of its entries those of one kind."""
    content = _description(file).get(key)
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, kind)]


def _arrow_rows(file: Path, features: dict[str, Any]) -> FileRows:
    """Find the place of each picture in an Arrow file, by the addresses in its memory map."""
    import pyarrow

    if file.suffix != ".arrow":
        raise DataError(f"{printable(file)} does not end in .arrow; save the dataset again")
    try:
        check_regular(file, limit=2**62)
        _check_uncompressed(file)
        with pyarrow.memory_map(str(file)) as source:
            base, size = source.read_buffer(1).address, source.size()
            source.seek(0)
            reader = pyarrow.ipc.open_stream(source)
            picture, label = picture_column(reader.schema), label_column(reader.schema, features)
            if picture is None:
                raise ValueError(f"it has no column of pictures ({', '.join(reader.schema.names)})")
            rows = FileRows([], [], [])
            for batch in reader:
                check_count(len(rows.paths) + len(batch), size)
                batch.validate(full=True)  # or its offsets may point anywhere
                _add_batch(rows, file, batch, (picture, label), features, (base, size))
            return rows
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"can't read {printable(file)}: {reason}") from error
    except Exception as error:  # as above
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{printable(file)} is not a readable dataset: {reason}") from error


def _check_uncompressed(file: Path) -> None:
    """Refuse compressed batches before a byte is decompressed: a few can become any number."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        for message in pyarrow.ipc.MessageReader.open_stream(source):
            if is_compressed(message.metadata.to_pybytes()):
                raise ValueError(COMPRESSED)


def _add_batch(
    rows: FileRows,
    file: Path,
    batch: Any,
    columns: tuple[str, str | None],
    features: dict[str, Any],
    mapped: tuple[int, int],
) -> None:
    picture, label = columns
    base, size = mapped
    column = batch.column(picture)
    names, kind = [""] * len(column), column.type
    if hasattr(kind, "get_field_index"):
        if kind.get_field_index("path") >= 0:
            names = [str(name or "") for name in values_of(column.field("path"), {})]
        column = column.field("bytes")
    _, offsets, content = column.buffers()
    wide = str(column.type).startswith("large")
    ends = np.frombuffer(offsets, dtype=np.int64 if wide else np.int32)
    ends = ends[column.offset : column.offset + len(column) + 1].astype(np.int64)
    start = (content.address if content is not None else base) - base
    values = values_of(batch.column(label), {}) if label else [None] * len(column)
    labels = labels_in(values, label, features)
    for row, valid in enumerate(column.is_valid().to_pylist()):
        first, last = start + int(ends[row]), start + int(ends[row + 1])
        if not valid:
            raise ValueError(f"row {len(rows.paths)} has no bytes: embed the files, then save")
        if not 0 <= first <= last <= size:
            raise ValueError(COMPRESSED)
        rows.paths.append(part_path(Part(file, first, last - first), names[row]))
        rows.labels.append(labels[row])


def _description(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_regular(file))
    except (OSError, ValueError) as error:
        raise DataError(f"can't read {printable(file)}: {error}; save the dataset again") from error
    return content if isinstance(content, dict) else {}
