"""Tensors and files: read them without running code, copy them into a module if they fit."""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from nofuss.errors import RunError, UsageError
from nofuss.files import check_regular, memory


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a .safetensors, .pth or .pt file; refuse pickled code."""
    if not path.is_file():
        raise UsageError(f"no weights at {path}; give a .safetensors, .pth or .pt file")
    try:
        check_regular(path, limit=memory())
    except OSError as error:
        raise RunError(f"can't read {path}: {error.strerror}; give another file") from None
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise RunError(f"can't read {path}: {error}; copy or download it again") from None
    _check_archive(path)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a different type for every kind of damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(
            f"can't read {path} as plain tensors ({reason}); convert it to .safetensors"
        ) from None
    if not isinstance(stored, Mapping) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise RunError(f"{path} is not a dict of tensors; save module.state_dict() alone")
    for name, tensor in stored.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise RunError(f"{path} holds {name!r:.60}, which is not a plain tensor; convert it")
    return dict(stored)


def _check_archive(path: Path) -> None:
    """Refuse an archive that is larger than its file; torch itself does not compress."""
    try:
        if not zipfile.is_zipfile(path):  # which raises for an archive on several disks
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise RunError(f"can't read {path}: {error}; copy or download it again") from None
    if size > path.stat().st_size:
        raise RunError(
            f"{path} is compressed, and holds {size:,} bytes; save it with torch.save, or convert "
            "it to .safetensors"
        )


def fill(module: nn.Module, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Copy `tensors` into `module`; RunError if any is missing, surplus, misshapen or infinite."""
    check_shapes(module, {name: t.shape for name, t in tensors.items()}, source=source)
    module.load_state_dict(dict(tensors), strict=False)
    values = module.state_dict().items()
    if bad_names := [
        name for name, t in values if t.is_floating_point() and not t.isfinite().all()
    ]:
        raise RunError(
            f"{source} holds NaN or infinity in {_listing(bad_names)}; restore it or train again"
        )


def check_shapes(module: nn.Module, shapes: Mapping[str, Sequence[int]], *, source: Path) -> None:
    """Compare a file's shapes with a module's; the module may be on the meta device."""
    wanted = module.state_dict()
    # Networks saved before torch 0.4.1 have no such counter, and it is not used here.
    missing = {k for k in wanted.keys() - shapes.keys() if not k.endswith("num_batches_tracked")}
    surplus = shapes.keys() - wanted.keys()
    misshapen = {
        f"{k} {tuple(shapes[k])} instead of {tuple(wanted[k].shape)}"
        for k in wanted.keys() & shapes.keys()
        if tuple(shapes[k]) != tuple(wanted[k].shape)
    }
    problems = [
        f"{what} {_listing(names)}"
        for what, names in (("lacks", missing), ("has surplus", surplus), ("has", misshapen))
        if names
    ]
    if problems:
        raise RunError(f"{source} {'; '.join(problems)}; is it the file of another network?")


def read_shapes(path: Path) -> dict[str, Sequence[int]]:
    """Read the shapes in the header of a .safetensors file, and nothing else of it."""
    try:
        check_regular(path, limit=memory())
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(f"can't read {path}: {error}; copy or download it again") from None


def _listing(names: Iterable[str], *, most: int = 4) -> str:
    known = sorted(repr(name)[1:-1] for name in names)
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + rest
