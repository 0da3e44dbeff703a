"""Tensors in files: read without running code, and put into a module or say what does not fit."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nofuss.errors import RunError, UsageError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors, .pth or .pt file; pickled code is refused."""
    if not path.is_file():
        raise UsageError(f"no weights at {path}; give a .safetensors, .pth or .pt file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise RunError(f"can't read {path}: {error}; copy or download it again") from None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a different type for every kind of damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(
            f"can't read {path} as plain tensors ({reason}); convert it to .safetensors"
        ) from None
    if not isinstance(stored, Mapping) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise RunError(f"{path} is no dict of tensors; save module.state_dict() alone")
    return dict(stored)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Copy `tensors` into `module`; missing, surplus and misshapen ones are one error."""
    wanted = module.state_dict()
    # Networks saved before torch 0.4.1 have no such counter, and nothing here reads it.
    missing = {k for k in wanted.keys() - tensors.keys() if not k.endswith("num_batches_tracked")}
    surplus = tensors.keys() - wanted.keys()
    shapes = {
        f"{k} {tuple(tensors[k].shape)} instead of {tuple(wanted[k].shape)}"
        for k in wanted.keys() & tensors.keys()
        if tensors[k].shape != wanted[k].shape
    }
    problems = [
        f"{what} {_listing(names)}"
        for what, names in (("lacks", missing), ("has surplus", surplus), ("has", shapes))
        if names
    ]
    if problems:
        raise RunError(f"{source} {'; '.join(problems)}; is it the file of another network?")
    module.load_state_dict(dict(tensors), strict=False)


def _listing(names: Iterable[str], *, most: int = 4) -> str:
    known = sorted(names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest
