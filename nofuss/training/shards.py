"""The part of a checkpoint that is distributed over processes: proxies and their moments.

    checkpoints/step-N/shard-R.safetensors   the rows of rank R, and which rows they are

A process reads the rows that it holds now from whichever files have them, so that a run may be
resumed with another number of processes. All machines must see the run directory.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nofuss.distributed.processes import exchange, first, rank
from nofuss.distributed.shard import Shard
from nofuss.files.atomic import sha256, sync
from nofuss.files.folders import write_folder

WHOLE = "tensors.safetensors"


class Cut(NamedTuple):
    """Which tensors are distributed by rows, given by name prefixes, and the rows held here."""

    shard: Shard
    names: tuple[str, ...]

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that hold this process's rows."""
        return {k: t for k, t in tensors.items() if k.startswith(self.names) and t.ndim == 2}


@contextmanager
def folder_of_all(path: Path) -> Iterator[Path]:
    """Let all processes fill one `write_folder`; all continue once it has appeared."""
    if not first():
        yield Path(exchange("")[0])
        exchange("filled")
        exchange("")
        return
    with write_folder(path) as new:
        exchange(str(new))
        yield new
        exchange("filled")
    exchange("appeared")


def write_shards(folder: Path, tensors: Mapping[str, Tensor], shard: Shard) -> dict[str, str]:
    """Write this process's rows and return the checksums of all files."""
    own = folder / f"shard-{rank()}.safetensors"
    rows = {"start": str(shard.start), "total": str(shard.total)}
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, own, metadata=rows)
    sync(own)
    return {f"shard-{r}.safetensors": each for r, each in enumerate(exchange(sha256(own)))}


def read_cut(folder: Path, files: Iterable[str], cut: Cut | None) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; of distributed ones the rows of the cut, or all."""
    tensors: dict[str, Tensor] = {}
    files = list(files)
    held = sum(_rows(folder / name) for name in files if name != WHOLE) if cut is None else None
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            if name == WHOLE:
                tensors |= {key: _own_rows(file, key, cut) for key in file.keys()}  # noqa: SIM118
            else:
                _fill(tensors, file, cut, held)
    return tensors


def _rows(file: Path) -> int:
    """Return how many rows the tensors of a shard's file have."""
    with safe_open(file, framework="pt") as opened:
        return max((opened.get_slice(key).get_shape()[0] for key in opened.keys()), default=0)  # noqa: SIM118


def _own_rows(file: Any, key: str, cut: Cut | None) -> Tensor:
    """Read a tensor that one process wrote whole: all of it, or the rows of the cut."""
    shape = file.get_slice(key).get_shape()
    is_distributed = cut is not None and key.startswith(cut.names) and len(shape) == 2
    tensor: Tensor = (
        file.get_slice(key)[cut.shard.rows] if cut and is_distributed else file.get_tensor(key)
    )
    return tensor


def _fill(tensors: dict[str, Tensor], file: Any, cut: Cut | None, held: int | None) -> None:
    """Copy the rows that a shard's file has of those held here; held: rows of all files."""
    start, total = (int(file.metadata()[name]) for name in ("start", "total"))
    if start < 0 or (held is not None and total > held):
        raise ValueError(f"rows from {start} of {total}, but all files together have {held}")
    own = cut.shard.rows if cut else slice(0, total)
    for key in file.keys():  # noqa: SIM118
        part = file.get_slice(key)
        rows, dim = part.get_shape()
        low, high = max(start, own.start), min(start + rows, own.stop)
        if low >= high:
            continue
        rows_here = part[low - start : high - start]
        # Rows that no file has become NaN, which training refuses, instead of uninitialised memory.
        whole = tensors.setdefault(key, rows_here.new_full((own.stop - own.start, dim), torch.nan))
        whole[low - own.start : high - own.start] = rows_here
