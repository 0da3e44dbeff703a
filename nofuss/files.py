"""Files of ours: written whole or not at all; read only if regular and not too large; one writer.

A write goes to a temporary name in the same folder, is flushed, and renamed: a crash leaves the old
file or the new one. Contents that belong together are written under names of their own first, and
put in force by replacing one small JSON file that names them. Checksums find damage; they are not
signatures.
"""

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shlex
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
from numpy.typing import NDArray

from nofuss.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

Bytes = bytes | memoryview
READ_LIMIT = 2**30
"""Largest file to read from a path given by others, in bytes: no picture or text has more."""
JSON_LIMIT = 2**26
"""Largest JSON file, or file of lines of JSON, of a run."""
TEMPORARY = ".writing-"
"""Begins the name of a file that is not whole yet."""
LOCK, OWNER = ".lock", ".lock.owner"
PATIENCE = 1.0
"""Seconds to wait for a process that has just ended to release a lock."""
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


# ---- reading


def check_regular(path: Path, *, limit: int = READ_LIMIT) -> int:
    """Return the size of a regular file of at most `limit` bytes; OSError says what else it is."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_size > limit:
        text = f"{status.st_size:,} bytes, more than the limit of {limit:,}"
        raise OSError(errno.EFBIG, text, str(path))
    return status.st_size


def read_bytes(path: Path, *, limit: int = READ_LIMIT) -> bytes:
    """Read a regular file of at most `limit` bytes; those of /proc, without a size, are empty."""
    return path.read_bytes() if check_regular(path, limit=limit) else b""


def memory() -> int:
    """Return the bytes of this machine's memory: larger files of numbers are not opened."""
    return max(READ_LIMIT, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# ---- writing


def write_file(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole."""
    if isinstance(content, str):  # a file name may contain bytes that are not UTF-8
        content = content.encode("utf-8", "backslashreplace")
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush a folder's entries, which are in force: an error must not read as "not written"."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_by_content(folder: Path, stem: str, suffix: str, content: bytes) -> str:
    """Write STEM-SHA16.SUFFIX, unless it is there; return the SHA-256 of the content."""
    checksum = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{checksum[:16]}.{suffix}"
    if not (path.is_file() and sha256(path) == checksum):
        write_file(path, content)
    return checksum


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file, which is replaced as a whole: all of them, or none.

    Where its last line was cut, a new one is begun. Of several writers each waits for the others.
    """
    with filelock.FileLock(path.with_name(f".{path.name}{LOCK}")):
        before = read_bytes(path, limit=JSON_LIMIT) if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        after = before + "".join(f"{line}\n" for line in lines).encode()
        if len(after) > JSON_LIMIT:
            raise OSError(errno.EFBIG, f"more than the limit of {JSON_LIMIT:,} bytes", str(path))
        write_file(path, after)


def read_lines(path: Path) -> list[Any]:
    """Return the JSON in each line, None for one that is not whole; nothing without a file.

    A last line that was cut is left out.
    """
    if not path.exists():
        return []
    found = []
    for line in read_bytes(path, limit=JSON_LIMIT).split(b"\n"):
        try:
            found.append(parse_json(line))
        except ValueError:
            found.append(None)
    return found if found[-1] is not None else found[:-1]


# ---- JSON and tables


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file with an object and its checksum."""
    write_file(path, json_bytes(content))


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return an object with its checksum as JSON, for `read_json`."""
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=2, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")  # names may not be in UTF-8


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; OSError or ValueError if it is unreadable or was changed."""
    return json_object(read_bytes(path, limit=JSON_LIMIT))


def json_object(stored: bytes) -> dict[str, Any]:
    """Return the object in bytes that `json_bytes` or another program made, else ValueError."""
    content = parse_json(stored)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    expected = content.pop("checksum", None)  # files made by other programs have none
    if expected not in (None, _checksum(content)):
        raise ValueError("its checksum differs")
    return content


def parse_json(content: bytes) -> Any:
    """Parse bytes from outside; ValueError if they are not JSON, too deep, or have huge numbers."""

    def whole(digits: str) -> int:  # a larger one overflows wherever it is used
        if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
            raise ValueError(f"the number {digits[:20]}… is too large")
        return number

    try:
        return json.loads(content, parse_int=whole)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; text that a spreadsheet would take for a formula gets a leading '."""
    with io.StringIO(newline="") as text:
        csv.writer(text).writerows(
            [f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell for cell in row]
            for row in rows
        )
        return text.getvalue()


def csv_cell(text: str) -> str:
    """Return a cell that `csv_text` wrote as it was before."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


# ---- tensors and checksums


def tensor_bytes(
    tensors: Mapping[str, "Tensor | NDArray[Any]"], about: Mapping[str, Any] | None = None
) -> bytes:
    """Return tensors, and an object about them, as safetensors."""
    from safetensors.torch import save

    # One entry: the format stores several in any order, and equal runs must have equal bytes.
    return save(for_file(tensors), None if about is None else {"about": json.dumps(dict(about))})


def for_file(tensors: Mapping[str, "Tensor | NDArray[Any]"]) -> dict[str, "Tensor"]:
    """Return tensors as safetensors takes them: on the CPU, contiguous, none in another's memory.

    Layers of a module may share their weights; a file holds them once for each.
    """
    import torch

    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, value in tensors.items():
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return found


def load_tensors(path: Path) -> tuple[dict[str, "Tensor"], Any]:
    """Read what `tensor_bytes` made: tensors mapped into memory, and the object, None without.

    OSError or ValueError if it is unreadable or no such file.
    """
    from safetensors import SafetensorError, safe_open

    check_regular(path, limit=memory())
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("about")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return tensors, None if about is None else parse_json(about.encode())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file, read back from the disk."""
    check_regular(path, limit=memory())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*parts: Bytes, size: int = 16) -> str:
    """Return a BLAKE2b digest of the parts: a key for the cache, or to compare contents.

    Of 2³² different contents, two share 16 bytes with a chance of 2⁻⁶⁵.
    """
    made = hashlib.blake2b(digest_size=size)
    for part in parts:
        made.update(part)
    return made.hexdigest()


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array's values in order, without a copy where they lie in order."""
    return np.ascontiguousarray(array).data


def tensor_parts(tensors: Mapping[str, "Tensor"]) -> Iterator[Bytes]:
    """Return names and values of tensors, as keys of the cache contain them."""
    for name, tensor in tensors.items():
        yield name.encode()
        yield array_bytes(tensor.detach().cpu().numpy())


# ---- one writer


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with its process; RunError says who has it.

    All processes of one command call this; under torchrun the first holds the lock for all. What
    a killed process has left half-written is deleted.
    """
    from nofuss.distributed import processes  # here: whoever only reads files needs no torch

    lock, owner = filelock.FileLock(folder / LOCK, timeout=PATIENCE), folder / OWNER

    def take() -> str:
        try:
            lock.acquire()
        except filelock.Timeout:
            who = "another process"
            with suppress(OSError):  # it has not said yet, or just ended
                who = owner.read_text(errors="replace")
            raise RunError(
                f"{folder} is being written by {who}; wait until it ends, or stop it, and try again"
            ) from None
        for left in [*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"*/{TEMPORARY}*")]:
            left.unlink(missing_ok=True)
        command = shlex.join(["nofuss", *sys.argv[1:2]])
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        write_file(owner, f"process {os.getpid()} ({command!r:.100}, since {since})")
        return ""

    try:
        processes.from_first(take)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # a run that was deleted
                owner.unlink()
            lock.release()
