"""Folders that appear as a whole, and clearing what killed processes left.

A folder of a run must lie in the run: a link to another folder is refused, not followed.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from nofuss.errors import RunError
from nofuss.files.atomic import TEMPORARY, sync, temporary_name

Read = TypeVar("Read")
REPLACED_AT_MOST = 10
"""How often a folder may be replaced while it is read."""


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which replaces `path` as a whole if no error occurs."""
    refuse_link(path)
    _bring_back(path)
    with scratch_folder(path.parent, path.name) as new:
        yield new
        for file in new.iterdir():
            sync(file)
        sync(new)
        if not path.exists():
            new.rename(path)
        elif not _exchange(new, path):
            # Without an atomic exchange, `path` is missing between two renames; a kill there is
            # repaired by `_bring_back` when the folder is written the next time.
            old = path.with_name(temporary_name(path.name, "old"))
            path.rename(old)
            try:
                new.rename(path)
            except OSError:
                old.rename(path)
                raise
            remove(old)
        sync(path.parent)


def read_folder(path: Path, read: Callable[[], Read]) -> Read:
    """Return what `read` finds in a folder, all of it from before or after it was replaced.

    Another process may exchange the folder between two files: then it is read again.
    """
    for _ in range(REPLACED_AT_MOST):
        before = _identity(path)
        try:
            found = read()
        except Exception:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return found
    return read()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


@contextmanager
def scratch_folder(parent: Path, name: str = "scratch") -> Iterator[Path]:
    """Yield a new, empty folder, and delete it afterwards."""
    folder = parent / temporary_name(name)
    folder.mkdir()
    try:
        yield folder
    finally:
        remove(folder)


def own_folder(path: Path) -> Path:
    """Make a folder if there is none; refuse a link to one."""
    refuse_link(path)
    path.mkdir(exist_ok=True)
    return path


def refuse_link(path: Path) -> None:
    """Raise RunError if a folder of a run is a link to another place."""
    if path.is_symlink():
        raise RunError(
            f"{path} is a link, but a run is written only inside its folder; replace it by a folder"
        )


def remove(path: Path) -> None:
    """Delete a file, a link (not its target) or a folder; ignore what can't be deleted."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


def is_temporary(name: str) -> bool:
    """Return whether a name is a temporary one of `new_file` or `write_folder`."""
    return TEMPORARY.fullmatch(name) is not None


def clear_remains(folder: Path) -> None:
    """Delete what killed processes left half-written; only for the holder of the lock."""
    if folder.is_dir():
        for path in [path for path in folder.iterdir() if is_temporary(path.name)]:
            if path.name.endswith(".new"):
                remove(path)


def _bring_back(path: Path) -> None:
    """Undo the first of the two renames in `write_folder` if a kill prevented the second."""
    if not path.parent.is_dir():
        return
    for old in sorted(path.parent.iterdir()):
        parts = TEMPORARY.fullmatch(old.name)
        if parts and parts.groups() == (path.name, "old"):
            if path.exists() or old.is_symlink():
                remove(old)
            else:
                old.rename(path)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; return False if the system or the file system can't."""
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
