"""Pictures inside a file: shards of WebDataset, tables of Arrow and Parquet.

A picture inside a file has a path like any other, which says where it is, so that it can be
written into an index and read back:

    shards/train-000.tar/@1536+20480/robin.jpg     20,480 bytes from byte 1,536 on
    data/train.parquet/@17/robin.jpg               row 17

Tar and Arrow files hold a picture's bytes as they are, so no other package is needed to read them.
Parquet compresses them: pyarrow decodes a group of rows at a time, and the last ones are kept.
"""

import errno
import os
import re
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

LARGEST_GROUP = 2**30
"""Bytes of a group of rows of Parquet, decoded; and of all groups that are kept."""
_PART = re.compile(
    r"(.+\.(?:tar|arrow))/@(\d{1,18})\+(\d{1,18})/[^/]*|(.+\.parquet)/@(\d{1,18})/[^/]*", re.DOTALL
)


class Part(NamedTuple):
    """Some bytes of a file, or the picture in a row of a Parquet file."""

    file: Path
    start: int
    """The first byte; in Parquet the row."""
    size: int | None = None
    """None in Parquet."""


class Status(NamedTuple):
    """Size and time of change of a file; of a part, its own size where it is known."""

    size: int
    mtime_ns: int


def part_path(part: Part, name: str) -> Path:
    """Return the path of a part; `name` is for people."""
    plain = re.sub(r"[^\w. -]", "_", name.rpartition("/")[2])[-80:].strip(". ")
    place = f"@{part.start}" if part.size is None else f"@{part.start}+{part.size}"
    return part.file / place / (plain or "item")


def part_of(path: Path) -> Part | None:
    """Return the part that a path made by `part_path` names; None for other paths."""
    text = os.fspath(path)
    if "/@" not in text.replace(os.sep, "/"):
        return None
    match = _PART.fullmatch(text.replace(os.sep, "/"))
    if match is None:
        return None
    if match[4]:
        return Part(Path(match[4]), int(match[5]))
    return Part(Path(match[1]), int(match[2]), int(match[3]))


def is_compressed(path: Path) -> bool:
    """Return whether a path names a picture that other pictures must be decoded with."""
    part = part_of(path)
    return part is not None and part.size is None


def status_of(path: Path) -> Status:
    """Return the status of a file, or of a part of one; OSError if it does not exist."""
    part = part_of(path)
    status = (part.file if part else path).stat()
    size = part.size if part and part.size is not None else status.st_size
    return Status(size, status.st_mtime_ns)


def read_part(part: Part, file: IO[bytes], limit: int) -> BytesIO:
    """Return a part of an opened file, completely; OSError if it is too large or not there."""
    if part.size is None:
        content = _read_cell(part.file, part.start)
    else:
        _check_size(part, part.size, limit)
        file.seek(part.start)
        content = file.read(part.size)
        if len(content) != part.size:
            raise OSError(errno.EINVAL, "ends before this picture", str(part.file))
    _check_size(part, len(content), limit)
    return BytesIO(content)


def _check_size(part: Part, size: int, limit: int) -> None:
    if size > limit:
        text = f"{size:,} bytes, more than the limit of {limit:,}"
        raise OSError(errno.EFBIG, text, str(part.file))


def _read_cell(file: Path, row: int) -> bytes:
    """Return the picture in a row of a Parquet file."""
    try:
        content = _groups.holding(file, row)
    except Exception as error:  # pyarrow has many, and a file from outside may raise any
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(errno.EIO, reason, str(file)) from error
    if isinstance(content, OSError):
        raise content
    if not isinstance(content, bytes):
        raise OSError(errno.ENODATA, "no picture in this row", str(file))
    return content


def picture_column(schema: Any) -> str | None:
    """Return the column of an Arrow schema that holds encoded pictures; None if there is none."""
    usual = ("image", "img", "picture", "photo", "jpg", "png", "bytes", "content", "data")
    held = [field.name for field in schema if holds_bytes(field.type)]
    named = [name for name in held if name.lower() in usual]
    return next(iter((*named, *held)), None)


def holds_bytes(kind: Any) -> bool:
    """Return whether an Arrow type is bytes, or a struct with a field `bytes` of bytes."""
    import pyarrow.types as types

    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and holds_bytes(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


class _Group(NamedTuple):
    """The pictures of a group of rows."""

    first: int
    """The number of its first row."""
    cells: list[object]
    size: int
    """Bytes of all pictures."""


class _Groups:
    """The groups of rows of Parquet files that were read last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, int, int], _Group] = OrderedDict()
        self._lock = Lock()

    def holding(self, file: Path, row: int) -> object:
        """Return the picture in a row; the group that holds it is read and kept."""
        version = file.stat().st_mtime_ns
        with self._lock:
            for (path, first, when), group in self._kept.items():
                if (path, when) == (file, version) and first <= row < first + len(group.cells):
                    self._kept.move_to_end((path, first, when))
                    return group.cells[row - first]
            group = _read_group(file, row)
            self._kept[file, group.first, version] = group
            while len(self._kept) > 1 and self._bytes() > LARGEST_GROUP:
                self._kept.popitem(last=False)
            return group.cells[row - group.first]

    def _bytes(self) -> int:
        return sum(group.size for group in self._kept.values())


def _read_group(file: Path, row: int) -> _Group:
    """Read the pictures of the group that holds a row; OSError if it is too large, or not there.

    Row after row, for which pyarrow takes no longer: bytes that are stored once can stand for every
    row of a group, so its size is known only as it is read.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        first = 0
        for number in range(opened.num_row_groups):
            group = opened.metadata.row_group(number)
            if row >= first + group.num_rows:
                first += group.num_rows
                continue
            if not 0 < group.num_rows <= file.stat().st_size:
                raise OSError(errno.EINVAL, f"a group of {group.num_rows:,} rows", str(file))
            if not 0 <= group.total_byte_size <= LARGEST_GROUP:
                raise _too_large(file, group.total_byte_size)
            column = picture_column(opened.schema_arrow)
            cells, known, size = list[object](), dict[object, object](), 0
            reader = opened.iter_batches(
                1, row_groups=[number], columns=[column], use_threads=False
            )
            for batch in reader:
                [cell] = batch.column(0).to_pylist()
                content = cell.get("bytes") if isinstance(cell, dict) else cell
                if content not in known:
                    size += len(content) if isinstance(content, bytes) else 0
                cells.append(known.setdefault(content, content))  # equal pictures are kept once
                if size > LARGEST_GROUP:  # for all its rows, so that it is not read for each
                    return _Group(first, [_too_large(file, size)] * group.num_rows, 0)
            if row < first + len(cells):
                return _Group(first, cells, size)
            break
    raise OSError(errno.EINVAL, f"has no row {row}", str(file))


def _too_large(file: Path, size: int) -> OSError:
    text = f"a group of rows of {size:,} bytes, more than the limit of {LARGEST_GROUP:,}"
    return OSError(errno.EFBIG, text, str(file))


_groups = _Groups()
