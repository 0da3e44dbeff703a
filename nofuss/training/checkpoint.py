"""Checkpoints: one file each, which appears as a whole or not at all.

    checkpoints/step-N.safetensors   model, criterion, optimizer; in its metadata the position of
                                     training (epoch, step, history) as JSON, and a SHA-256 of all

The last two are kept. Loading verifies the newest and falls back to the one before. Of several
processes the first collects what is distributed and writes; each reads its own rows, so that any
number of processes resumes what any other number wrote.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nofuss.distributed.processes import first, from_first
from nofuss.distributed.shard import Shard
from nofuss.errors import RunError, one_line
from nofuss.files import check_regular, for_file, parse_json, write_file

log = logging.getLogger("nofuss")
FORMAT = 2
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What was read back."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Sharded(NamedTuple):
    """Which tensors are distributed by rows, by prefixes of their names, and the rows held here."""

    shard: Shard
    names: tuple[str, ...]

    def has(self, name: str, ndim: int) -> bool:
        """Return whether processes hold different rows of this tensor."""
        return ndim == 2 and name.startswith(self.names)


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    sharded: Sharded | None = None,
) -> None:
    """Write step-N, then delete all but it and the one before; all processes call it.

    Later steps, from which training fell back because they were damaged, are deleted too.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        is_part = sharded is not None and sharded.has(name, tensor.ndim)
        collected = sharded.shard.collect(tensor) if sharded and is_part else tensor
        if collected is not None:  # else the first process has it
            whole[name] = collected
    if not first():
        return
    folder.mkdir(exist_ok=True)
    text, ready = json.dumps({"step": step, **state}), for_file(whole)
    about = {"format": str(FORMAT), "state": text, "sha256": _checksum(text, ready.items())}
    write_file(folder / f"step-{step}.safetensors", save(ready, about))
    earlier = [path for path in _newest_first(folder) if _step(path) <= step]
    for old in set(_newest_first(folder)) - {*earlier[:KEPT]}:
        old.unlink(missing_ok=True)


def load_checkpoint(folder: Path, *, sharded: Sharded | None = None) -> Checkpoint | None:
    """Return the newest intact checkpoint or None; damaged ones are logged."""
    intact = from_first(lambda: _newest_intact(folder))
    return _read(folder / intact, sharded) if intact else None


def _newest_intact(folder: Path) -> str:
    for path in _newest_first(folder):
        try:
            _verify(path)
        except RunError as error:
            log.warning(f"{error}; looking for the checkpoint before")
        else:
            return path.name
    return ""


def _newest_first(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*.safetensors") if p.stem[5:].isdecimal()]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem[5:])


def _verify(path: Path) -> None:
    """Raise RunError if the file is not what was written."""
    try:
        check_regular(path, limit=sys.maxsize)
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != str(FORMAT):
                raise RunError(f"{path} has format {about.get('format')}, expected {FORMAT}")
            tensors = ((name, file.get_tensor(name)) for name in sorted(file.keys()))
            if about["sha256"] != _checksum(about["state"], tensors):
                raise RunError(f"{path} is damaged: its checksum differs")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise RunError(f"{path} can't be read ({reason})") from None


def _read(path: Path, sharded: Sharded | None) -> Checkpoint:
    """Read a verified file: of distributed tensors the rows that this process holds."""
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            is_part = sharded is not None and sharded.has(name, len(part.get_shape()))
            rows = sharded.shard.rows if sharded and is_part else None
            tensors[name] = file.get_tensor(name) if rows is None else part[rows]
        state = parse_json(file.metadata()["state"].encode())
    return Checkpoint(state["step"], tensors, state)


def _checksum(state: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of the state and of the name, type, shape and values of every tensor."""
    made = hashlib.sha256(state.encode())
    for name, tensor in tensors:
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors `optimizer.PARAMETER.NAME`, without rates."""
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore `optimizer_tensors`, each in the memory layout of its parameter.

    Fused optimizers walk parameter and state side by side in memory, without looking at sizes: with
    channels-last weights and state as the file has it, they would pair the wrong numbers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if not key.startswith("optimizer."):
            continue
        _, index, name = key.split(".", 2)
        like = parameters[int(index)] if int(index) < len(parameters) else None
        if like is None or value.shape not in (like.shape, ()):
            got = f"{key} is {tuple(value.shape)}"
            raise RunError(f"the checkpoint does not fit the optimizer: {got}")
        held = torch.empty_like(like, dtype=value.dtype) if value.ndim else torch.empty_like(value)
        state.setdefault(int(index), {})[name] = held.copy_(value)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def module_tensors(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state_dict with names under `prefix.`."""
    return {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}


def restore_module(prefix: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore `module_tensors`; every name must exist and fit."""
    own = {
        k.removeprefix(f"{prefix}."): t for k, t in tensors.items() if k.startswith(f"{prefix}.")
    }
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(f"the checkpoint does not fit the {prefix}: {reason}") from None
