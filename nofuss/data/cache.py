"""Where rendered, scanned and decoded data is kept between runs, and how it is written and read.

Everything in the cache can be made again: deleting the directory costs time, never data.
A file appears there whole or not at all, so a kill or a full disk leaves no half-written one; a
checksum goes with it, so what a failing disk has changed is made again, with a line that says so.
"""

import hashlib
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nofuss.files.atomic import TEMPORARY, check_regular, memory, new_file, read_json, sealed_json

ABANDONED = 24 * 3600.0
"""Seconds after which nobody is still writing a file."""


def cache_directory() -> Path:
    """$NOFUSS_CACHE, else $XDG_CACHE_HOME/nofuss, else ~/.cache/nofuss."""
    if own := os.environ.get("NOFUSS_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "nofuss"
    return Path.home() / ".cache" / "nofuss"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Let `write` fill a file that takes the place of `path`; False where that fails.

    A cache that can't be written (read-only home, full disk) slows the next run down and
    is no reason to stop this one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            write(file)
        for other in path.parent.iterdir():  # of writers that were killed
            abandoned = time.time() - other.lstat().st_mtime > ABANDONED
            if abandoned and TEMPORARY.fullmatch(other.name) and other.is_file():
                other.unlink()
    except OSError:
        return False
    return True


def warn_damaged(path: Path, problem: object) -> None:
    """Say that something is made again, and why."""
    reason = " ".join(str(problem).split())
    warnings.warn(f"{path} is damaged ({reason}) and made again", stacklevel=3)


def write_tensor(path: Path, tensor: Tensor) -> bool:
    """Keep one tensor with its checksum."""
    tensor = tensor.detach().cpu().contiguous()
    content = save({"kept": tensor}, metadata={"sha256": _checksum(tensor)})
    return write_atomically(path, lambda file: file.write(content))


def read_tensor(path: Path, *, like: Tensor) -> Tensor | None:
    """What `write_tensor` kept, of the shape and type of `like` (which may be of device meta).

    None where there is nothing, or something else: then a warning says so.
    """
    try:
        check_regular(path, limit=memory())
        with safe_open(path, framework="pt") as file:
            checksum: str = (file.metadata() or {})["sha256"]
            tensor: Tensor = file.get_tensor("kept")
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)}, not {tuple(like.shape)}")
        if checksum != _checksum(tensor):
            raise ValueError("its checksum differs")
        return tensor
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        warn_damaged(path, problem)
        return None


def write_notes(path: Path, notes: dict[str, Any]) -> bool:
    """Keep what JSON can hold, with its checksum."""
    return write_atomically(path, lambda file: file.write(sealed_json(notes)))


def read_notes(path: Path) -> dict[str, Any]:
    """What `write_notes` kept; empty where there is nothing, or something else."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        warn_damaged(path, problem)
        return {}


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()
