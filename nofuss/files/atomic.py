"""Writes that survive a crash, and reads of regular files only.

A reader finds the old content or the new, never half of it. A path that comes from outside may lead
to a pipe, a device or an endless file: its type and size are checked before a byte is read.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any

from nofuss.files.checksum import sha256_of, sha256_of_file

MANIFEST = "manifest.json"
READ_LIMIT = 2**30
"""Largest file to read from a path given by others, in bytes: no picture or text has more."""
DESCRIPTION_LIMIT = 2**26
"""Largest JSON file that describes a run."""
PARSED = 24
"""How many times its size a JSON file may take in memory when it is parsed."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path, *, limit: int = READ_LIMIT) -> BufferedReader | BytesIO:
    """Open a regular file of at most `limit` bytes for reading; OSError says what else it is.

    Opening never waits for a writer, and a device is not even opened. A file of size 0 counts as
    empty: files of /proc have that size, and some of them are endless.
    """
    check_regular(path, limit=limit)
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 returned to the caller
    try:  # check again: another file may have replaced it
        size = _size_of(os.fstat(file.fileno()), path, limit)
    except OSError:
        file.close()
        raise
    if size:
        return file
    file.close()
    return BytesIO()


def check_regular(path: Path, *, limit: int = READ_LIMIT) -> int:
    """Return the size of a regular file, for readers that need a path; OSError otherwise."""
    return _size_of(os.stat(path), path, limit)


def read_regular(path: Path, *, limit: int = READ_LIMIT) -> bytes:
    """Read all of a regular file."""
    with open_regular(path, limit=limit) as file:
        return file.read()


def memory() -> int:
    """Return the bytes of this machine's memory: larger files of numbers are not opened."""
    return max(READ_LIMIT, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _size_of(status: os.stat_result, path: Path, limit: int) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
    if status.st_size > limit:
        size = f"{status.st_size:,} bytes, more than the limit of {limit:,}"
        raise OSError(errno.EFBIG, size, str(path))
    return status.st_size


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def flush(descriptor: int) -> None:
    """Flush an open file or directory to the disk; on macOS fsync alone stops at the drive."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError:  # a file system without it
            os.fsync(descriptor)
    else:
        os.fsync(descriptor)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole."""
    if isinstance(content, str):  # a file name may contain bytes that are not UTF-8
        content = content.encode("utf-8", "backslashreplace")
    with new_file(path) as file:
        file.write(content)


def append_lines(path: Path, lines: Iterable[str], *, limit: int = READ_LIMIT) -> None:
    """Append lines to a file of at most `limit` bytes and flush them; no link is followed.

    A killed process may leave part of a line at the end: what is appended later starts a new line,
    so that readers find one line that is not whole, and lose no other.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        size = _size_of(status := os.fstat(descriptor), path, limit)
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "a hard link to another file; delete it", str(path))
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        content = b"\n" * is_torn + content
        while content:
            content = content[file.write(content) or 0 :]
        os.fsync(descriptor)


TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.(new|old)", re.DOTALL)


def temporary_name(name: str, end: str = "new") -> str:
    """Return a random name that does not exist yet; `TEMPORARY` recognises such names."""
    return f".{name}.{secrets.token_hex(8)}.{end}"


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to fill, which replaces `path` as a whole if no error occurs.

    It is made under a random new name, so that no link which somebody put into the folder is
    followed; a link at `path` itself is replaced, and its target stays as it is.
    """
    temporary, flags = temporary_name(path.name), os.O_WRONLY | os.O_CREAT | os.O_EXCL
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        descriptor = os.open(temporary, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                flush(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        flush(folder)
    finally:
        os.close(folder)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Wait until no other process holds this folder; the lock ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Write manifest.json with the checksum of every other file of a folder."""
    sums = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=2) + "\n")


def check_seal(folder: Path) -> None:
    """Raise ValueError or OSError if a file differs from its checksum in the manifest."""
    sums = parse_json(read_regular(folder / MANIFEST, limit=DESCRIPTION_LIMIT))
    if not isinstance(sums, dict):
        raise ValueError(f"{MANIFEST} is not an object")
    for name, expected in sums.items():
        if sha256(folder / Path(name).name) != expected:
            raise ValueError(f"the checksum of {name} differs")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file with an object and its checksum."""
    write_file(path, sealed_json(content))


def sealed_json(content: dict[str, Any]) -> bytes:
    """Return an object with its checksum as JSON, for `read_json`."""
    text = json.dumps(content | {"checksum": _checksum(content)}, indent=2, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")  # names may not be in UTF-8


def read_json(path: Path, *, limit: int = DESCRIPTION_LIMIT) -> dict[str, Any]:
    """Read what `write_json` wrote; OSError or ValueError if it is unreadable or was changed."""
    content = parse_json(read_regular(path, limit=limit))
    if not isinstance(content, dict):
        raise ValueError("not an object")
    expected = content.pop("checksum", None)  # files made by other programs have none
    if expected not in (None, _checksum(content)):
        raise ValueError("its checksum differs")
    return content


def _whole_number(digits: str) -> int:
    """Parse a whole number of 64 bits; a larger one overflows wherever it is used."""
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"the number {digits[:20]}… is too large")
    return number


def parse_json(content: bytes) -> Any:
    """Parse bytes from outside; ValueError if they are not JSON, or nested too deeply."""
    try:
        return json.loads(content, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _checksum(content: dict[str, Any]) -> str:
    return sha256_of([json.dumps(content, sort_keys=True).encode()])


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file, read back from the disk."""
    with open_regular(path, limit=memory()) as file:
        return sha256_of_file(file)
