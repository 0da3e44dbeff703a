"""Writes that survive a crash: a reader finds the old content or the new, never half of it."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Fill the folder handed out; it takes the place of `path` as a whole when all went well."""
    temporary, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    """The file's checksum, read back from where it lies."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
