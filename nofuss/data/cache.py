"""Where rendered, scanned and decoded data is kept between runs, and how it is written.

Everything in the cache can be made again: deleting the directory costs time, never data.
A file appears there whole or not at all, so a kill or a full disk leaves no half-written one.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def cache_directory() -> Path:
    """$NOFUSS_CACHE, else $XDG_CACHE_HOME/nofuss, else ~/.cache/nofuss."""
    if own := os.environ.get("NOFUSS_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "nofuss"
    return Path.home() / ".cache" / "nofuss"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Let `write` fill a temporary file, then rename it to `path`; False where that fails.

    A cache that can't be written (read-only home, full disk) slows the next run down and
    is no reason to stop this one.
    """
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        return False
    return True
