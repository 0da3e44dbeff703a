"""Writes that survive a crash, and reads of nothing but files.

A reader finds the old content or the new, never half of it. A path that others name may lead to a
pipe, a device or a file without end: what and how large it is, is looked at before a byte is read.
"""

import ctypes
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MANIFEST = "manifest.json"
READ_LIMIT = 2**30
"""Bytes of a file that others name; more is no picture and no description of anything."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path, *, limit: int = READ_LIMIT) -> IO[bytes]:
    """Open a regular file of at most `limit` bytes for reading; OSError says what else it is.

    Opening never waits for a writer, and a device is not even opened. A file of no size is empty,
    whatever reading it would give: the files of /proc have none, and some have no end.
    """
    check_regular(path, limit=limit)
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 handed to the caller
    try:  # again: another file may have taken the name
        size = _size_of(os.fstat(file.fileno()), path, limit)
    except OSError:
        file.close()
        raise
    if size:
        return file
    file.close()
    return io.BytesIO()


def check_regular(path: Path, *, limit: int = READ_LIMIT) -> int:
    """The size of a regular file, for readers that want a path; OSError for anything else."""
    return _size_of(os.stat(path), path, limit)


def _size_of(status: os.stat_result, path: Path, limit: int) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
    if status.st_size > limit:
        size = f"{status.st_size:,} bytes, more than the {limit:,} that are read of such a file"
        raise OSError(errno.EFBIG, size, str(path))
    return status.st_size


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        if isinstance(content, str):  # a file name may hold bytes that are no UTF-8
            content = content.encode("utf-8", "backslashreplace")
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with this folder; a killed one is in no longer."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Fill the folder handed out; it takes the place of `path` as a whole when all went well."""
    temporary, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)  # killed between the two renames below
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if not path.exists():
            temporary.rename(path)
        elif not _exchange(temporary, path):
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            try:
                temporary.rename(path)
            except OSError:
                old.rename(path)
                raise
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system can't."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    if renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(b))


def seal(folder: Path) -> None:
    """Write manifest.json with the checksum of every other file of a folder."""
    sums = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=2) + "\n")


def check_seal(folder: Path) -> None:
    """ValueError, or OSError, where a file is not what was sealed."""
    sums = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(sums, dict):
        raise ValueError(f"{MANIFEST} is no object")
    for name, expected in sums.items():
        if sha256(folder / Path(name).name) != expected:
            raise ValueError(f"the checksum of {name} differs")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file with an object; its checksum goes with it."""
    sealed = content | {"checksum": _checksum(content)}
    write_file(path, json.dumps(sealed, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; OSError or ValueError where it can't be read or was changed."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("not an object")
    expected = content.pop("checksum", None)  # files of other programs have none
    if expected not in (None, _checksum(content)):
        raise ValueError("its checksum differs")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The file's checksum, read back from where it lies."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
