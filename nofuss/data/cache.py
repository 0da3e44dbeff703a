"""Where rendered, scanned and decoded data is kept between runs, and how it is written and read.

    <cache>/features-<key>.sqlite         features by a backbone, see model/feature_store.py
    <cache>/backbone-<key>.onnx           a backbone's graph for onnxruntime
    <cache>/activations-<key>.bin         for fine-tuning, see model/activations.py
    <cache>/characters-<key>.npz          the built-in characters
    <cache>/han-<key>.npz                 Han and Hangul characters, see `han.py`
    <cache>/scans/<key>.json              what `scan.py` found in each file
    <cache>/pictures/<key>/               decoded pictures, see `pictures.py`

Everything in the cache can be made again: deleting the directory costs time, never data.
A file appears there whole or not at all, so a kill or a full disk leaves no half-written one. Its
checksum is stored with it, so that a file which a failing disk has changed is noticed, made again,
and reported in a line. Features and graphs together have a limit (`LIMIT`): the ones that were not
used for the longest time are deleted first, and only files with such names. Activations have a
limit of their own.
"""

import os
import re
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from nofuss.files import READ_LIMIT, TEMPORARY, json_bytes, new_file, read_json

ABANDONED = 24 * 3600.0
"""Seconds after which a temporary file belongs to no running process."""
LIMIT = 8 * 2**30
"""Bytes that features and graphs of backbones may take together."""
# Earlier versions kept features as safetensors, which are not read any more.
_LIMITED = re.compile(r"features-[0-9a-f]{32}\.(sqlite|safetensors)|backbone-[0-9a-f]{32}\.onnx")


def cache_directory() -> Path:
    """Return $NOFUSS_CACHE, else $XDG_CACHE_HOME/nofuss, else ~/.cache/nofuss."""
    if directory := os.environ.get("NOFUSS_CACHE"):
        return Path(directory)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "nofuss"
    return Path.home() / ".cache" / "nofuss"


def try_write(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Let `write` fill a file that replaces `path`; return False where that fails.

    A cache that can't be written (read-only home, full disk) slows the next run down and
    is no reason to stop this one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            write(file)
        for other in path.parent.iterdir():  # of writers that were killed
            abandoned = time.time() - other.lstat().st_mtime > ABANDONED
            if abandoned and other.name.startswith(TEMPORARY) and other.is_file():
                other.unlink()
    except OSError:
        return False
    return True


def mark_used(path: Path) -> None:
    """Set a file's time to now: `make_room` deletes the file that was used longest ago first."""
    with suppress(OSError):  # a cache that is read-only
        os.utime(path)


def make_room(
    needed: int,
    *,
    limit: int | None = None,
    keep: Path | None = None,
    names: re.Pattern[str] = _LIMITED,
) -> bool:
    """Delete features and graphs, longest unused first, until `needed` bytes fit the limit.

    Return False, and delete nothing, where `needed` alone is more than the limit. Files under
    other names, folders and links are neither counted nor deleted. keep: a file that is to hold
    the `needed` bytes, not counted and not deleted either. names: of other files than features and
    graphs that share a limit.
    """
    room = (LIMIT if limit is None else limit) - needed
    if room < 0:
        return False
    files: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in cache_directory().iterdir():
            with suppress(FileNotFoundError):  # another process has just deleted it
                status = path.lstat()
                if path == keep or not names.fullmatch(path.name):
                    continue
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):  # the last used come first, and stay
        total += size
        if total > room:
            with suppress(OSError):
                path.unlink()
    return True


def warn_damaged(path: Path, problem: object) -> None:
    """Warn that a damaged file is made again, and why."""
    reason = " ".join(str(problem).split())
    warnings.warn(f"{path} is damaged ({reason}) and made again", stacklevel=3)


def write_notes(path: Path, notes: dict[str, Any]) -> bool:
    """Write an object as JSON with its checksum; return False where that fails."""
    return try_write(path, lambda file: file.write(json_bytes(notes)))


def read_notes(path: Path) -> dict[str, Any]:
    """Read what `write_notes` wrote; empty if there is no file or a damaged one."""
    try:
        return read_json(path, limit=READ_LIMIT)  # of every file of a large folder
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        warn_damaged(path, problem)
        return {}
