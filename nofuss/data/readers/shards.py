"""Pictures inside files: WebDataset shards (.tar), Parquet, Hugging Face datasets saved to disk.

    train-000.tar    0001.jpg 0001.cls 0002.jpg 0002.json …    the label beside the picture
                     robin/1.jpg wren/7.jpg …                  or the folder, or a pattern
    train.parquet    columns image (bytes, or paths beside the table), label, split

Members of a tar file with the same name up to the first dot are one sample. Labels are numbers or
text; `datasets` writes the names of classes beside its columns. Only names and labels are read
here: an item is `FILE#ROW`, see `items.py`. Items keep the order of the files, so that processes,
which take consecutive items, read different files.
"""

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from tarfile import TarInfo
from typing import Any, NamedTuple

import numpy as np

from nofuss.data.collection import (
    TEST,
    TRAIN,
    Collection,
    first_five,
    printable,
    reading,
    refuse,
)
from nofuss.data.decode import SUFFIXES
from nofuss.data.items import picture_column, read_columns, read_item, table_schema, tar_members
from nofuss.data.readers.folder import (
    BY_FOLDER,
    SPLIT_WORDS,
    Labelling,
    Skipped,
    named,
)
from nofuss.data.readers.table import SPLITS, by_number_or_name, existing
from nofuss.data.triplets import NO_LABEL
from nofuss.errors import DataError
from nofuss.files import check_regular, parse_json, read_bytes

LARGEST_LABEL = 2**16
"""Bytes of a .cls or .json file."""
LABELS = ("label", "labels", "cls", "class", "class_name", "category", "target", "fine_label")
"""Names of columns, and of fields in a .json file."""
PATHS = (
    *("path", "file_name", "filename", "filepath", "file_path", "image_path", "file"),
    *("image", "img", "picture"),
)


class Row(NamedTuple):
    """A picture: its path or address, its name in the file, its label and side, or ""."""

    path: Path
    name: str
    label: str
    side: str = ""


def open_shards(files: Sequence[Path], root: Path, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open the pictures in tar files, in order; their labels as stored, else by their names."""
    skipped = Skipped()
    rows = [row for file in files for row in _read(file, "tar file", _shard_rows(file, skipped))]
    layout = f"WebDataset, {len(files):,} {'shard' if len(files) == 1 else 'shards'}"
    used = None if any(row.label for row in rows) else labelling
    if used is not None:
        rows = [row._replace(label=labelling.class_of(Path(row.name)) or "") for row in rows]
        layout += labelling.describe()
    return replace(_joined(rows, files, root, layout), labelling=used, skipped=named(skipped, root))


def open_parquet(files: Sequence[Path], root: Path) -> Collection:
    """Open the pictures in Parquet files, in order."""
    rows = [row for file in files for row in _read(file, "Parquet file", _table_rows(file))]
    layout = "Parquet" if len(files) == 1 else f"Parquet, {len(files):,} files"
    return _joined(rows, files, root, layout)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` has saved a dataset, or a dictionary of them, to this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def open_saved_dataset(folder: Path) -> Collection:
    """Open what `save_to_disk` wrote: a dataset, or one for each side of a split."""
    sides, skipped = {folder: ""}, tuple[tuple[str, str], ...]()
    if (folder / "dataset_dict.json").is_file():
        names = _listed(folder / "dataset_dict.json", "splits", str)
        sides = {folder / n: SPLIT_WORDS[n.lower()] for n in names if n.lower() in SPLIT_WORDS}
        if not sides:
            raise DataError(
                f"{folder} has the splits {', '.join(names)}; expected "
                "train and test (or validation)"
            )
        beside = f"splits beside {' and '.join(each.name for each in sides)}"
        skipped = tuple((printable(n), beside) for n in names if folder / n not in sides)
    rows, files = list[Row](), list[Path]()
    for place, side in sides.items():
        for entry in _listed(place / "state.json", "_data_files", dict):
            files.append(place / Path(str(entry.get("filename"))).name)
            rows += _read(files[-1], "dataset", _table_rows(files[-1], side))
    if not files:
        raise DataError(f"{folder} lists no data files in state.json; save it again")
    return replace(_joined(rows, files, folder, "Hugging Face dataset on disk"), skipped=skipped)


def _joined(rows: list[Row], files: Sequence[Path], root: Path, layout: str) -> Collection:
    """Return the collection of all pictures."""
    name = root.name if len(files) > 1 or layout.startswith("Hugging") else files[0].stem
    if not rows:
        raise DataError(
            f"{name} holds no pictures; expected 0001.jpg, 0001.cls, … in a tar file, "
            "or rows with a picture"
        )
    unlabelled, sides = [row.name for row in rows if not row.label], [row.side for row in rows]
    if unlabelled and len(unlabelled) < len(rows):
        names = first_five(unlabelled)
        raise DataError(
            f"{name} has pictures without a label: {names}; add them, or leave these out"
        )
    labels, class_names = by_number_or_name([row.label for row in rows])
    if unlabelled:
        labels, class_names = np.full(len(rows), NO_LABEL, dtype=np.int64), []
    return Collection(
        name=printable(name),
        layout=layout,
        paths=[row.path for row in rows],
        root=root,
        labels=labels,
        class_names=tuple(map(printable, class_names)),
        split=np.array(sides) if all(sides) and {TRAIN, TEST} <= set(sides) else None,
    )


def _read(file: Path, kind: str, rows: Iterable[Row]) -> list[Row]:
    """Return all rows of a file, with the side in its name; DataError where it can't be read."""
    with reading(file, kind):
        check_regular(file, limit=2**62)
        side = _side_by_name(file)
        return [row if row.side else row._replace(side=side) for row in rows]


def _side_by_name(file: Path) -> str:
    """Return the side of the split in the name of a file, as in train-000.tar, or its folder's."""
    for name in (file.stem, file.parent.name):
        words = re.split(r"[^a-z]+", name.lower())
        if found := {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}:
            return found.pop() if len(found) == 1 else ""
    return ""


# Tar


def _shard_rows(file: Path, skipped: Skipped) -> Iterator[Row]:
    """Yield the pictures of a shard with their labels; note what is neither."""
    for _, sample in groupby(enumerate(tar_members(file)), key=lambda each: _stem(each[1].name)):
        picture, label = None, ""
        for number, member in sample:
            base = PurePosixPath(member.name).name
            ending, suffix = base.partition(".")[2], PurePosixPath(base).suffix.lower()
            if member.isdir():
                continue
            if not member.isreg() or member.issparse() or base.startswith("."):
                skipped.append((file / member.name, "links, hidden and special files in shards"))
            elif suffix in SUFFIXES and picture is None:
                picture = (Path(f"{file}#{number}"), member.name)
            elif ending in ("cls", "label", "json"):
                label = label or _label(file, number, member)
            else:
                reason = "files in shards that are neither picture nor label"
                skipped.append((file / member.name, reason))
        if picture is not None:
            yield Row(*picture, label)


def _stem(name: str) -> tuple[str, str]:
    """Return what the files of a sample have in common: folder, and name up to the first dot."""
    folder, _, base = name.rpartition("/")
    return folder, base.partition(".")[0]


def _label(file: Path, number: int, member: TarInfo) -> str:
    """Return the label in a .cls or .json file, "" if a .json has none."""
    try:
        if member.size > LARGEST_LABEL:
            raise ValueError(f"a label of {member.size:,} bytes")
        content = read_item(Path(f"{file}#{number}"))
        if not member.name.endswith(".json"):
            return content.decode("utf-8", "backslashreplace").strip()
        fields = parse_json(content)
    except ValueError as error:
        raise DataError(f"{file.name}/{member.name}: {error}") from error
    if not isinstance(fields, dict):
        return ""
    found = (fields[key] for key in LABELS if isinstance(fields.get(key), int | str))
    return str(next(found, ""))


# Parquet and Arrow


def _table_rows(file: Path, side: str = "") -> Iterator[Row]:
    """Yield the rows of a table: pictures as bytes, or as paths relative to the file."""
    if file.suffix.lower() not in (".parquet", ".arrow"):
        raise DataError(f"{file} does not end in .arrow; save the dataset again")
    schema = table_schema(file)
    picture, (label, classes) = picture_column(schema), _label_column(schema)
    texts = {field.name for field in schema if str(field.type) in ("string", "large_string")}
    place = next((name for name in PATHS if name in texts), None)
    if picture is not None and _holds_paths(file, schema.field(picture).type):
        picture, place = None, f"{picture}.path"
    if picture is None and place is None:
        raise DataError(
            f"{file} has the columns {', '.join(schema.names)}; expected "
            "pictures as bytes in a column like image, or their paths in a column like path"
        )
    split = "split" if "split" in schema.names else None
    wanted = [name for name in (label, split, None if picture else place) if name]
    count, cells = read_columns(file, wanted)
    labels = _labels(cells[label], label, classes) if label else [""] * count
    sides = _sides(cells[split], file) if split else [side] * count
    paths = [Path(f"{file}#{row}") for row in range(count)]
    names = [path.name for path in paths]
    if picture is None and place is not None:
        paths = _existing(file, cells[place])
    yield from map(Row, paths, names, labels, sides)


def _holds_paths(file: Path, kind: Any) -> bool:
    """Return whether images are stored as paths only, as `to_parquet` does: by the first row."""
    if not hasattr(kind, "get_field_index") or kind.get_field_index("path") < 0:
        return False
    try:
        read_item(Path(f"{file}#0"))
    except OSError as error:
        return error.errno == errno.ENODATA
    return False


def _existing(file: Path, values: Sequence[Any]) -> list[Path]:
    """Return the files that a column names, relative to the table; all of them must exist."""
    paths, complaints = list[Path](), list[str]()
    for row, value in enumerate(values):
        try:
            paths.append(existing(file.parent, str(value)))
        except ValueError as error:
            complaints.append(f"row {row}: {error}")
    refuse(file, complaints)
    return paths


def _sides(values: Sequence[Any], file: Path) -> list[str]:
    words = [str(value).strip().lower() for value in values]
    if unknown := sorted({word for word in words if word not in SPLITS}):
        found = first_five(unknown)
        raise DataError(f"{file}: split has {found}; expected train and test")
    return [SPLITS[word] for word in words]


def _label_column(schema: Any) -> tuple[str | None, list[Any] | None]:
    """Return the column of labels, and the names that `datasets` stores for their numbers.

    A column with names of classes comes first, then one with a usual name.
    """
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        classes = {column: feature.get("names") for column, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        classes = {}
    classes = {column: names for column, names in classes.items() if isinstance(names, list)}
    usual = [name for name in LABELS if name in schema.names]
    both = [name for name in usual if name in classes]
    column = next((name for name in (*both, *usual, *classes) if name in schema.names), None)
    return column, classes.get(column)


def _labels(values: Sequence[Any], column: str, classes: list[Any] | None) -> list[str]:
    """Return labels as text; class names in place of numbers where there are."""
    if any(isinstance(value, list | dict | bytes) for value in values):
        raise ValueError(f"{column} holds lists or bytes; expected numbers or text")
    if classes is None:
        return ["" if value is None else str(value) for value in values]
    if any(not isinstance(v, int) or not 0 <= v < len(classes) for v in values if v is not None):
        raise ValueError(f"{column} has numbers beyond its {len(classes):,} class names")
    return ["" if value is None else str(classes[value]) for value in values]


def _listed(file: Path, key: str, kind: type) -> list[Any]:
    """Return the list under a key of a JSON file; of its entries those of one kind."""
    with reading(file, "list of files"):
        content = parse_json(read_bytes(file))
    entries = content.get(key) if isinstance(content, dict) else None
    return [e for e in entries if isinstance(e, kind)] if isinstance(entries, list) else []
