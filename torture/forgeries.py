"""Values that training never writes into a run, with all checksums made to match."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nofuss.files import read_json, sha256, write_json
from nofuss.model.saved import model_files
from nofuss.training.checkpoint import load_checkpoint, save_checkpoint

SEALED = ("config.json", "data.json", "environment.json", "scores.json", "model.json")
Forge = Callable[[Path, Path], None]
"""Called with the run and a folder that stands for the rest of the disk."""


def model_json(**changes: Any) -> Forge:
    """Change values in model.json, in its preprocessing and its extra."""

    def forge(run: Path, disk: Path) -> None:
        file = run / "model" / "model.json"
        content = read_json(file)
        for name, value in changes.items():
            parent = next((p for p in ("preprocessing", "extra") if name in content[p]), None)
            if name in ("strangers", "rerank"):
                parent = "extra"
            (content if parent is None else content[parent])[name] = value
        write_json(file, content)

    return forge


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    """Change the weights of the head."""

    def forge(run: Path, disk: Path) -> None:
        file = model_files(run / "model")[1]
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors["head.weight"] = change(tensors["head.weight"])
        save_file(tensors, file)
        _seal_weights(file)

    return forge


def _seal_weights(file: Path) -> None:
    description = file.with_name("model.json")
    write_json(description, read_json(description) | {"weights": sha256(file)})
    file.rename(file.with_name(f"weights-{sha256(file)[:16]}{file.suffix}"))


def index_vectors(change: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    """Change the vectors in the index."""

    def forge(run: Path, disk: Path) -> None:
        file = next((run / "index").glob("vectors-*"))
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors["vectors"] = change(tensors["vectors"]).contiguous()
        save_file(tensors, file)
        _seal_index(file)

    return forge


def index_items(change: Callable[[dict[str, Any]], Any]) -> Forge:
    """Change the items in the index."""

    def forge(run: Path, disk: Path) -> None:
        file = next((run / "index").glob("items-*"))
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
        _seal_index(file)

    return forge


def _seal_index(file: Path) -> None:
    part = file.name.partition("-")[0]
    manifest = manifest_of(file.parent)
    content = read_json(manifest)
    content["files"][part] = sha256(file)
    write_json(manifest, content)
    file.rename(file.with_name(f"{part}-{content['files'][part][:16]}{file.suffix}"))


def manifest_of(folder: Path) -> Path:
    """Return the manifest of an index."""
    return next(path for path in folder.glob("*.json") if not path.name.startswith("items-"))


def reseal(file: Path) -> None:
    """Make the checksums of a run match a file of it that was changed."""
    folder = file.parent
    if file.name.startswith("weights-"):
        _seal_weights(file)
    elif folder.name == "index" and "-" in file.name:
        _seal_index(file)
    elif file.name in SEALED or folder.name == "index":
        content = json.loads(file.read_bytes())
        content.pop("checksum", None)
        write_json(file, content)


def checkpoint(change: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    """Change the moments of the optimizer in the newest checkpoint, and vouch for it."""

    def forge(run: Path, disk: Path) -> None:
        found = load_checkpoint(run / "checkpoints")
        assert found is not None
        tensors = {k: change(t) if "exp_avg" in k else t for k, t in found.tensors.items()}
        save_checkpoint(run / "checkpoints", found.step, tensors, found.state)

    return forge


def config(**changes: Any) -> Forge:
    """Change settings."""

    def forge(run: Path, disk: Path) -> None:
        file = run / "config.json"
        write_json(file, read_json(file) | changes)

    return forge


def named(what: str) -> Forge:
    """Rename items of the index to something that is not a picture."""

    def forge(run: Path, disk: Path) -> None:
        os.mkfifo(disk / "pipe.png")
        with (disk / "sparse.png").open("wb") as file:
            file.truncate(2**40)
        folder, name = os.path.split(what.format(disk=disk))
        names = [f"{folder}/{n * './'}{name}" for n in range(32)]
        index_items(lambda i: {**i, "names": names})(run, disk)

    return forge


def deep(run: Path, disk: Path) -> None:
    """Return a text of very many nested brackets."""
    (run / "config.json").write_text("[" * 500_000)


NAN = float("nan")
FOR_SEARCH: tuple[Any, ...] = (NAN, -1, 1e308, "x", [], True, {"rule": "x"}, {"gains": {}})
MODEL: dict[str, Forge] = {
    **{f"strangers {s}": model_json(strangers=s) for s in FOR_SEARCH},
    **{f"rerank {r}": model_json(rerank=r) for r in FOR_SEARCH},
    **{f"dim {dim}": model_json(dim=dim) for dim in (0, -1, 10**7, 10**12, 2.5, "4")},
    **{f"channels {n}": model_json(channels=n) for n in (0, 10**7, "3")},
    **{f"size {size}": model_json(size=size) for size in (0, 3, 10**6, "16")},
    **{f"std {std}": model_json(std=std) for std in ([0, 0, 0], [NAN] * 3, [1], "xyz")},
    **{f"mode {mode}": model_json(mode=mode) for mode in ("L", "CMYK", 7)},
    "no preprocessing": model_json(preprocessing=None),
    "class names": model_json(class_names=[1, 2]),
    "NaN weights": weights(lambda w: w * NAN),
    "infinite weights": weights(lambda w: w * torch.inf),
    "weights that overflow": weights(lambda w: torch.full_like(w, 3e38)),
    "weights of another shape": weights(lambda w: w[:2].contiguous()),
}
INDEX: dict[str, Forge] = {
    "NaN vectors": index_vectors(lambda v: v * NAN),
    "wide vectors": index_vectors(lambda v: torch.cat([v, v], 1) / 2**0.5),
    "vectors of halves": index_vectors(lambda v: v.half()),
    "long vectors": index_vectors(lambda v: v * 1e30),
    "few vectors": index_vectors(lambda v: v[:3]),
    "names twice": index_items(lambda i: i | {"names": ["x"] * len(i["names"])}),
    "names that are numbers": index_items(lambda i: i | {"names": list(range(len(i["names"])))}),
    "origins of nobody": index_items(lambda i: i | {"origins": [["x", "y"]] * len(i["names"])}),
    "sources of nonsense": index_items(lambda i: i | {"sources": {"x": {"price": "money"}}}),
    "no object": index_items(lambda i: [i]),
    "control characters": index_items(
        lambda i: i | {"names": [f"\x1b[31m{n}\r\n[b]x" for n in range(len(i["names"]))]}
    ),
}
NAMED: dict[str, Forge] = {
    what: named(what)
    for what in (
        *("{disk}/pipe.png", "{disk}/sparse.png", "{disk}/pipe.png#0", "{disk}/none#0"),
        *("/dev/zero", "/dev/tty", "/proc/self/mem", "/proc/self/pagemap", "/proc/kmsg"),
    )
}
CHECKPOINT: dict[str, Forge] = {
    "short moments": checkpoint(lambda m: m[:1].clone()),
    "flat moments": checkpoint(lambda m: m.reshape(-1)),
}
CONFIG: dict[str, Forge] = {
    "seed −1": config(seed=-1),
    "seed 10³⁰": config(seed=10**30),
    "test share NaN": config(test_fraction=NAN),
    "data /dev/zero": config(data="/dev/zero"),
    "data /proc": config(data="/proc/self/fd"),
    "dim 10⁹": config(dim=10**9),
    "brackets without end": deep,
}
