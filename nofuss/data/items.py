"""The bytes of an item: of its own file, or of a row of a file that holds many.

    photos/robin/1.jpg           a file
    shards/train-000.tar#34      FILE#ROW: the member with this number, from 0
    data/train.parquet#17        a row; likewise of the .arrow files of a dataset saved to disk

Whoever decodes or hashes pictures reads them here. Tar needs nothing but Python, the others pyarrow
(extra `parquet`), which decodes Parquet a group of rows at a time; the last groups are kept.
"""

import errno
import os
import re
import sys
import tarfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nofuss.cache import digests
from nofuss.files import READ_LIMIT, check_regular, read_bytes

LARGEST_GROUP = 2**30
"""Bytes of a group of rows of Parquet, and of all groups that are kept."""
PICTURE_COLUMNS = ("image", "img", "picture", "photo", "jpg", "png", "bytes", "content", "data")
_ADDRESS = re.compile(r"(.+\.(?:tar|parquet|arrow))#(\d{1,18})", re.DOTALL | re.IGNORECASE)

Version = tuple[int, int]
"""Time of change and size: what was read of a file holds while these stay."""


def place_of(path: Path) -> tuple[Path, int] | None:
    """Return the file and the row of an address; None for the path of a file."""
    found = _ADDRESS.fullmatch(os.fspath(path))
    return (Path(found[1]), int(found[2])) if found else None


def file_of(path: Path) -> Path:
    """Return the file that holds an item."""
    place = place_of(path)
    return place[0] if place else path


def read_item(path: Path, *, limit: int = READ_LIMIT) -> bytes:
    """Return the bytes of an item; OSError if there is none, or one of more than `limit` bytes."""
    place = place_of(path)
    if place is None:
        return read_bytes(path, limit=limit)
    file, row = place
    check_regular(file, limit=sys.maxsize)
    readers = {".tar": _member, ".parquet": _parquet_cell, ".arrow": _arrow_cell}
    try:
        content = readers[file.suffix.lower()](file, row, _version(file))
    except Exception as error:  # tarfile and pyarrow have many
        if isinstance(error, OSError) and error.errno:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(errno.EIO, reason, str(path)) from error
    content = content.get("bytes") if isinstance(content, dict) else content
    if not isinstance(content, bytes):
        raise OSError(errno.ENODATA, "no picture in this row", str(path))
    if len(content) > limit:
        text = f"{len(content):,} bytes, more than the limit of {limit:,}"
        raise OSError(errno.EFBIG, text, str(path))
    return content


def content_keys(paths: Sequence[Path]) -> list[bytes]:
    """Return a digest of each item's content, b"" where it can't be read."""
    return digests(paths, read_item, file_of=file_of)


def _version(file: Path) -> Version:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


# Tar


def tar_members(file: Path) -> list[tarfile.TarInfo]:
    """Return the members of a tar file in order; ValueError for a damaged one."""
    with (
        file.open("rb") as opened,
        tarfile.open(fileobj=opened, mode="r:") as shard,
    ):
        members = []
        for member in shard:
            if member.size < 0:  # leads back, where some versions of Python never end
                raise ValueError(f"{member.name} has a negative size")
            members.append(member)
        opened.seek(shard.offset)
        if opened.read(512).strip(b"\0"):  # tarfile takes a damaged header for the end
            raise ValueError(f"no header of a member at byte {shard.offset:,}")
    return members


@cache
def _places(file: Path, version: Version) -> NDArray[np.int64]:
    """Return start and size (N, 2) of the members of a tar file; size −1 for what is no file."""
    places = [
        (m.offset_data, m.size if m.isreg() and not m.issparse() else -1) for m in tar_members(file)
    ]
    return np.array(places, np.int64).reshape(-1, 2)


def _member(file: Path, row: int, version: Version) -> bytes:
    start, size = _places(file, version)[row].tolist()
    if not 0 <= size <= READ_LIMIT:
        raise ValueError(f"no file of at most {READ_LIMIT:,} bytes")
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(size)


# Parquet and Arrow


def picture_column(schema: Any) -> str | None:
    """Return the column of an Arrow schema that holds encoded pictures; None if there is none."""
    held = [field.name for field in schema if _holds_bytes(field.type)]
    named = [name for name in held if name.lower() in PICTURE_COLUMNS]
    return next(iter((*named, *held)), None)


def _holds_bytes(kind: Any) -> bool:
    """Return whether an Arrow type is bytes, or a struct with a field `bytes` of bytes."""
    import pyarrow.types as types

    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def table_schema(file: Path) -> Any:
    """Return the Arrow schema of a Parquet or Arrow file."""
    from pyarrow import parquet

    is_arrow = file.suffix.lower() == ".arrow"
    return _arrow_table(file, _version(file)).schema if is_arrow else parquet.read_schema(file)


def read_columns(file: Path, columns: list[str]) -> tuple[int, dict[str, list[Any]]]:
    """Return the number of rows of a table, and the values of some of its columns."""
    from pyarrow import parquet

    if file.suffix.lower() == ".arrow":
        table = _arrow_table(file, _version(file))
        count = table.num_rows
    else:
        with parquet.ParquetFile(file) as opened:
            table, count = opened.read(columns=columns), opened.metadata.num_rows
    flat = table.flatten()  # image.path is a column
    return count, {name: flat.column(name).to_pylist() for name in columns}


@lru_cache(maxsize=64)
def _arrow_table(file: Path, version: Version) -> Any:
    import pyarrow

    table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
    table.validate(full=True)  # or the offsets of a damaged file may point anywhere
    return table


def _arrow_cell(file: Path, row: int, version: Version) -> Any:
    table = _arrow_table(file, version)
    return table.column(picture_column(table.schema))[row].as_py()


def _parquet_cell(file: Path, row: int, version: Version) -> Any:
    starts = _group_starts(file, version)
    if row >= starts[-1]:
        raise IndexError(f"index {row} is beyond the rows")
    number = int(np.searchsorted(starts, row, side="right")) - 1
    return _group(file, version, number)[row - int(starts[number])].as_py()


@cache
def _group_starts(file: Path, version: Version) -> NDArray[np.int64]:
    """Return the first row of each group of rows, and the number of all rows."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        groups = range(opened.num_row_groups)
        sizes = [opened.metadata.row_group(i).num_rows for i in groups]
    return np.cumsum([0, *sizes], dtype=np.int64)


_groups: dict[tuple[Path, Version, int], Any] = {}
_groups_lock = Lock()


def _group(file: Path, version: Version, number: int) -> Any:
    """Return the pictures of a group of rows; the groups that were used last are kept."""
    from pyarrow import parquet

    key = (file, version, number)
    with _groups_lock:
        if key not in _groups:
            with parquet.ParquetFile(file) as opened:
                size = opened.metadata.row_group(number).total_byte_size
                if not 0 <= size <= LARGEST_GROUP:
                    text = f"a group of rows of {size:,} bytes, more than the limit of"
                    raise ValueError(f"{text} {LARGEST_GROUP:,}")
                column = picture_column(opened.schema_arrow)
                _groups[key] = opened.read_row_group(number, columns=[column]).column(0)
        _groups[key] = _groups.pop(key)  # behind the others
        while len(_groups) > 1 and sum(each.nbytes for each in _groups.values()) > LARGEST_GROUP:
            del _groups[next(iter(_groups))]
        return _groups[key]
