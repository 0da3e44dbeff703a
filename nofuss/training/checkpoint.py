"""Checkpoints: safetensors + JSON + checksums in a folder that appears as a whole or not at all.

    checkpoints/step-N/tensors.safetensors   model, criterion, optimizer
                       state.json            epoch, step, history
                       manifest.json         sha256 of the others

and a file for each process's proxies if they are distributed: see `shards.py`. The last two
checkpoints are kept. Loading verifies the newest and falls back to the one before.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.amp import GradScaler

from nofuss.distributed.processes import exchange, first, rank, world
from nofuss.errors import RunError
from nofuss.files.atomic import DESCRIPTION_LIMIT, parse_json, read_regular, sha256
from nofuss.files.folders import own_folder, remove
from nofuss.files.lock import check_in_place
from nofuss.model.tensors import for_file
from nofuss.training.shards import WHOLE, Cut, folder_of_all, read_cut, write_shards

FORMAT = 1
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What was read back."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    *,
    cut: Cut | None = None,
) -> None:
    """Write step-N atomically, then delete all but it and the one before.

    All processes call it: those with a cut write their rows, the first one writes what is common.

    Later steps, from which training fell back because they were damaged, are deleted too, and so
    are the remains of saves that were killed.
    """
    if first():
        check_in_place(folder.parent)
        own_folder(folder)
    with folder_of_all(folder / f"step-{step}") as new:
        own = cut.parts(tensors) if cut else {}
        sums = write_shards(new, own, cut.shard) if cut else {}
        if first():
            common = {name: tensor for name, tensor in tensors.items() if name not in own}
            save_file(for_file(common), new / WHOLE)
            (new / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}))
            sums |= {name: sha256(new / name) for name in (WHOLE, "state.json")}
            (new / "manifest.json").write_text(json.dumps(sums))
    if not first():
        return
    later = [path for path in _newest_first(folder) if _step(path) > step]
    earlier = [path for path in _newest_first(folder) if _step(path) <= step]
    for old in [*later, *earlier[KEPT:], *folder.glob(".step-*")]:
        remove(old)  # what can't be deleted now is tried again next time


def load_checkpoint(
    folder: Path, *, say: Callable[[str], None], cut: Cut | None = None
) -> Checkpoint | None:
    """Return the newest intact checkpoint or None; `say` reports the damaged ones.

    Each process checks a part of the files; what one finds damaged, none uses.
    """
    for name in json.loads(exchange(json.dumps([p.name for p in _newest_first(folder)]))[0]):
        found, problem = None, ""
        try:
            found = _read(folder / name, cut)
        except RunError as error:
            problem = str(error)
        problems = [each for each in exchange(problem) if each]
        if not problems:
            return found
        say(f"{problems[0]}; falling back to the checkpoint before")
    return None


def _newest_first(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*") if p.name[5:].isdecimal()]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name[5:])


def _read(path: Path, cut: Cut | None) -> Checkpoint:
    try:
        sums = parse_json(read_regular(path / "manifest.json", limit=DESCRIPTION_LIMIT))
        files = [WHOLE, "state.json", *(sums.keys() - {WHOLE, "state.json"})]
        for name in sorted(files)[rank() :: world()]:
            if sums[name] != sha256(path / name):
                raise RunError(f"{path / name} is damaged: its checksum differs")
        state = parse_json(read_regular(path / "state.json", limit=DESCRIPTION_LIMIT))
        if state["format"] != FORMAT:
            raise RunError(f"{path} has format {state['format']}, expected {FORMAT}")
        _check_state(state, _step(path))
        tensors = read_cut(path, (name for name in files if name != "state.json"), cut)
        return Checkpoint(state["step"], tensors, state)
    except RunError:
        raise
    except Exception as error:  # whatever a damaged file makes a parser raise
        raise RunError(f"{path} can't be read ({type(error).__name__}: {error})") from None


def _check_state(state: dict[str, Any], step: int) -> None:
    """Raise ValueError for a state that training can't have had; checksums do not prove that."""
    if type(state["step"]) is not int or state["step"] != step:
        raise ValueError(f"step is {state['step']!r:.20}")
    for name in ("epoch", "at"):
        if type(state.get(name, 0)) is not int or not 0 <= state.get(name, 0) < 2**31:
            raise ValueError(f"{name} is {state[name]!r:.20}")
    loss = state.get("loss_sum", 0.0)
    if type(loss) not in (int, float) or not math.isfinite(loss):
        raise ValueError(f"loss_sum is {loss!r:.20}")
    history = state.get("history", [])
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("history is no list of epochs")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state under flat names `optimizer.PARAMETER.NAME`, without rates."""
    return dict(_flatten(optimizer.state_dict()["state"]))


def _flatten(state: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for index, values in state.items():
        for name, value in values.items():
            if value is not None:
                yield f"optimizer.{index}.{name}", torch.as_tensor(value)


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore `optimizer_tensors`, each in the memory layout of its parameter.

    Fused optimizers walk parameter and state side by side in memory: with channels-last weights
    and state as the file has it, they would pair the wrong numbers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    expected = _state_names(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if not key.startswith("optimizer."):
            continue
        _, index, name = key.split(".", 2)
        if not index.isdecimal() or int(index) >= len(parameters):
            raise RunError("the checkpoint does not fit the optimizer: it has more parameters")
        like = parameters[int(index)]
        # Fused optimizers iterate over the memory of both without checking their sizes.
        shape, kind = (like.shape, like.dtype) if expected.get(name) else ((), torch.float32)
        if name not in expected or value.shape != shape or value.dtype != kind:
            got = f"{name!r:.20} is {value.dtype} {tuple(value.shape)}"
            raise RunError(f"the checkpoint does not fit the optimizer: {got}")
        held = torch.empty_like(like, dtype=value.dtype) if shape else torch.empty_like(value)
        state.setdefault(int(index), {})[name] = held.copy_(value)
    if any(names.keys() != expected.keys() for names in state.values()):
        raise RunError(f"the checkpoint does not fit the optimizer: expected {sorted(expected)}")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _state_names(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """Return the names of this optimizer's state; True for those with the parameter's shape."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    kind: Any = type(optimizer)
    known = signature(kind).parameters  # AdamW keeps an option that it does not take
    probe = kind([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
    probe.step()
    return {name: value.ndim > 0 for name, value in probe.state[parameter].items()}


def restore_scaler(scaler: GradScaler, state: Any) -> None:
    """Restore a scaler's `state_dict`; RunError for numbers that it can't have had."""
    expected = scaler.state_dict()
    fits = isinstance(state, dict) and state.keys() == expected.keys()
    if not fits or not all(
        type(value) in (int, float) and math.isfinite(value) and value >= 0
        for value in state.values()
    ):
        raise RunError(f"the checkpoint does not fit the scaler: got {state!r:.60}")
    scaler.load_state_dict(state)


def module_tensors(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state_dict with names under `prefix.`."""
    return {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}


def restore_module(prefix: str, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore `module_tensors`; every name must exist and fit."""
    own = {
        k.removeprefix(f"{prefix}."): t for k, t in tensors.items() if k.startswith(f"{prefix}.")
    }
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(f"the checkpoint does not fit the {prefix}: {reason}") from None
