"""Files of a stranger: shards, Parquet and Arrow files that are larger than they look.

Each entry makes one file or folder; `nofuss doctor` must refuse it in one line, or open it with
little memory and time.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

Make = Callable[[Path], Path]
"""Called with an empty folder; returns what to open."""


def picture() -> bytes:
    """Return a small picture."""
    with io.BytesIO() as file:
        Image.new("L", (16, 16), 99).save(file, "PNG")
        return file.getvalue()


# Shards


def header(name: str, size: int, kind: bytes = b"0", *, raw: bytes | None = None) -> bytes:
    """Return the header of a member; raw: the field of its size as it is written."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"%011o\0" % size if raw is None else raw
    block[156:157] = kind
    return summed(block)


def summed(block: bytearray) -> bytes:
    """Return a header with its checksum."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    """Return content up to a whole number of blocks."""
    return content + bytes(-len(content) % 512)


def attributes(records: Iterable[tuple[bytes, bytes]], kind: bytes = b"x") -> bytes:
    """Return a header of attributes for the next member (x), or for all that follow (g)."""
    parts = []
    for key, value in records:
        record = b" %s=%s\n" % (key, value)
        length = len(record) + 1
        while length != len(record) + len(str(length)):
            length += 1
        parts.append(str(length).encode() + record)
    content = b"".join(parts)
    return header("attributes", len(content), kind) + padded(content)


def _extended() -> bytes:
    block = bytearray(header("a/1.png", 10, b"S"))
    block[482] = 1
    return summed(block)


def shards() -> dict[str, bytes]:
    """Return shards by name."""
    one = header("a/1.png", 0)
    sparse = [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")]
    member = header("a/9.png", len(picture())) + padded(picture())
    return {
        "a size below zero": header("a/1.png", 0, raw=b"\xff" * 12) + one,
        "a size that leads back": header("a/1.png", 0, raw=b"\xff" * 10 + b"\xfc\0") + one,
        "a size below zero in attributes": attributes([(b"size", b"-1024")]) + one,
        "a size of exabytes": header("a/1.png", 0, raw=b"\x80" + b"\x7f" * 11) + one,
        "a sparse map that is cut off": _extended(),
        "a sparse map of billions": attributes(sparse)
        + header("a/1.png", 512)
        + padded(b"99999999999\n1\n"),
        "80,000 attributes for every member": attributes(
            ((b"k%d" % i, b"v") for i in range(80_000)), b"g"
        )
        + b"".join(header(f"a/{i}.png", 0) for i in range(3_000)),
        "a megabyte of digits": header("x", 10**6, b"x") + padded(b"9" * 10**6) + one,
        "digits and a blank": header("x", 10**6, b"x") + padded(b"9" * (10**6 - 1) + b" ") + one,
        "5,000 long names in a row": (header("x", 512, b"L") + padded(b"n" * 500)) * 5_000 + one,
        "5,000 attributes in a row": attributes([(b"comment", b"x")]) * 5_000 + one,
        "names that lead elsewhere": header("../../9.png", len(picture()))
        + padded(picture())
        + header("/etc/passwd.png", 0)
        + header("../../../etc/x.png", 0, b"2"),
        "control characters": header("a\x1b]0;x\x07/1\n.png", 0) + member,
    }


def _shard(folder: Path, content: bytes) -> Path:
    (folder / "x.tar").write_bytes(content + bytes(1024))
    return folder / "x.tar"


# Parquet and Arrow


def _rows(table: Any, folder: Path, **options: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(table, folder / "x.parquet", compression="zstd", **options)
    return folder / "x.parquet"


def _shared(value: Any, count: int) -> Any:
    """Return a column of equal values that is stored as one."""
    import pyarrow

    codes = pyarrow.array([0] * count, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array([value]))


def same_picture(folder: Path) -> Path:
    """Write a picture of 2 MB that 300 rows share: 1 KB of Parquet, 600 MB when it is read."""
    import pyarrow

    names = pyarrow.array([str(i % 2) for i in range(300)])
    table = pyarrow.table({"image": _shared(picture() + bytes(2 * 10**6), 300), "label": names})
    return _rows(table, folder, store_schema=False)  # so that it reads as plain bytes


def same_label(folder: Path) -> Path:
    """Write a label of 20 MB that 100 rows share."""
    import pyarrow

    pictures = pyarrow.array([picture() + bytes([i]) for i in range(100)])
    table = pyarrow.table({"image": pictures, "label": _shared("x" * 20 * 10**6, 100)})
    return _rows(table, folder, store_schema=False)


def prefixes(folder: Path) -> Path:
    """Write labels that differ in their last letters only, each as its difference to the last."""
    import pyarrow

    labels = pyarrow.array(["x" * 2 * 10**5 + str(i) for i in range(200)])
    pictures = pyarrow.array([picture() + bytes([i]) for i in range(200)])
    table = pyarrow.table({"image": pictures, "label": labels})
    encoding = {"label": "DELTA_BYTE_ARRAY", "image": "PLAIN"}
    return _rows(table, folder, use_dictionary=False, column_encoding=encoding)


def no_pictures(folder: Path) -> Path:
    """Write ten million rows without a picture in a few kilobytes."""
    import pyarrow

    nothing = pyarrow.nulls(10**7, pyarrow.binary())
    return _rows(pyarrow.table({"image": nothing}), folder)


def nested_labels(folder: Path) -> Path:
    """Write labels that are lists."""
    import pyarrow

    table = pyarrow.table({"image": [picture()] * 3, "label": [["a"] * 1000] * 3})
    return _rows(table, folder)


def _dataset(folder: Path, table: Any, options: Any = None) -> Path:
    import pyarrow

    with pyarrow.ipc.new_stream(folder / "x.arrow", table.schema, options=options) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "../" * 9 + "etc/x.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def compressed_batch(folder: Path) -> Path:
    """Write 256 MB of zeros as Arrow, compressed to some kilobytes."""
    import pyarrow

    table = pyarrow.table({"image": pyarrow.array([bytes(2**28)], pyarrow.large_binary())})
    return _dataset(folder, table, pyarrow.ipc.IpcWriteOptions(compression="zstd"))


def shared_label(folder: Path) -> Path:
    """Write a label of 10 MB once, and 400 rows that name it by its number."""
    import pyarrow

    table = pyarrow.table({"image": [picture()] * 400, "label": _shared("x" * 10**7, 400)})
    return _dataset(folder, table)


def shared_view(folder: Path) -> Path:
    """Write a label of 10 MB once, and 400 views of it."""
    import pyarrow

    label = pyarrow.array(["x" * 10**7], pyarrow.string_view())
    views = label.buffers()[1].to_pybytes() * 400
    buffers = [None, pyarrow.py_buffer(views), label.buffers()[2]]
    labels = pyarrow.Array.from_buffers(pyarrow.string_view(), 400, buffers)
    return _dataset(folder, pyarrow.table({"image": [picture()] * 400, "label": labels}))


OF_ARROW: dict[str, Make] = {
    "a picture that 300 rows share": same_picture,
    "a label that 100 rows share": same_label,
    "labels as differences": prefixes,
    "ten million rows of nothing": no_pictures,
    "labels that are lists": nested_labels,
    "256 MB in a compressed batch": compressed_batch,
    "a label that 400 codes share": shared_label,
    "a label that 400 views share": shared_view,
}


def data_bombs() -> dict[str, Make]:
    """Return all of them; those of Arrow where pyarrow is installed."""
    made = {name: partial(_shard, content=content) for name, content in shards().items()}
    return {**made, **(OF_ARROW if find_spec("pyarrow") else {})}
