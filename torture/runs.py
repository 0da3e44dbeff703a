"""Runs that a stranger made: links, special files, huge files, and values that nofuss never writes.

Every attack gets a copy of one finished run. A folder beside it stands for the rest of the disk: no
byte in it may change, and no file may be added. Checksums of forged files are made to match.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from nofuss.files import LOCK, read_json, sha256, write_json
from nofuss.search.folder import FolderIndex
from nofuss.training.checkpoint import load_checkpoint, save_checkpoint
from torture.commands import Case, Commands
from torture.training import FLAGS, write_pictures

Forge = Callable[[Path, Path], object]
"""Called with the run and the folder that stands for the rest of the disk."""
MEGABYTES = 1000.0
"""Most memory of a command; torch alone has more than 300 MB."""


class Attack(NamedTuple):
    """A forgery, and the commands to run on it."""

    name: str
    forge: Forge
    commands: str


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run every command on every forgery."""
    commands, data, whole = Commands(home), write_pictures(home / "data"), home / "whole"
    for words in (("train", data, "--out", whole, *FLAGS, "--epochs", "2"), ("index", whole)):
        ended = commands(*words)
        assert ended.code == 0, ended.said
    for attack in ATTACKS:
        for command in attack.commands.split():
            yield _run_attack(commands, home, attack, command)


def _run_attack(commands: Commands, home: Path, attack: Attack, command: str) -> Case:
    run, disk, query = home / "run", home / "disk", home / "data" / "class 0"
    for folder in (run, disk):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "whole", run)
    shutil.copytree(home / "whole", disk / "other run")
    (disk / "precious").write_text("precious")
    if command == "train":
        (run / "report.html").unlink()  # a finished run is not computed again
    attack.forge(run, disk)
    before = contents(disk)
    ended = commands(
        *{
            "evaluate": ("evaluate", run),
            "index": ("index", run, query),
            "search": ("search", run, query / "0.png", "--json"),
            "embed": ("embed", run, query, "--out", home / f"{os.urandom(8).hex()}.npz"),
            "train": ("train", "--out", run, "--resume"),
        }[command]
    )
    complaints = ended.complaints()
    complaints += [
        f"changed outside: {name}" for name, _ in before.items() ^ contents(disk).items()
    ]
    if command == "search" and "NaN" in ended.said.partition("nofuss: ")[0]:
        complaints.append("answered with NaN")
    if ended.megabytes > MEGABYTES:
        complaints.append(f"took {ended.megabytes:.0f} MB")
    return Case(f"{attack.name}, {command}", ended.refused, ended.seconds, complaints)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 2**30)
    return {str(path): path.read_bytes() for path in files}


# Links and special files


def file_link(name: str) -> Forge:
    """Put a link to a file elsewhere in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(disk / "precious")

    return forge


def folder_link(name: str) -> Forge:
    """Replace a sub-folder by a link to another run's."""

    def forge(run: Path, disk: Path) -> None:
        shutil.rmtree(run / name)
        (run / name).symlink_to(disk / "other run" / name)

    return forge


def pipe(run: Path, disk: Path) -> None:
    """Put a pipe in the place of a file that is read."""
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


def sparse(path: Path) -> None:
    """Make a sparse file of a terabyte."""
    with path.open("wb") as file:
        file.truncate(2**40)


def large(name: str) -> Forge:
    """Put a terabyte of zeros in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        file = next(iter(run.glob(name)))
        file.unlink()
        sparse(file)

    return forge


# Values that nofuss never writes


def in_json(name: str, **changes: Any) -> Forge:
    """Change values of a JSON file, also within its preprocessing and its extra."""

    def forge(run: Path, disk: Path) -> None:
        content = read_json(run / name)
        for key, value in changes.items():
            parents = [content.get("preprocessing") or {}, content.get("extra") or {}]
            parent = next((p for p in parents if key in p), content)
            (parents[1] if key in RULES else parent)[key] = value
        write_json(run / name, content)

    return forge


def tensor(pattern: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    """Change a tensor of the model or of the index."""

    def forge(run: Path, disk: Path) -> None:
        file = next(iter(run.glob(pattern)))
        tensors = {key: value.clone() for key, value in load_file(file).items()}
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, file)
        reseal(file)

    return forge


def items(change: Callable[[dict[str, Any]], Any]) -> Forge:
    """Change the items of the index."""

    def forge(run: Path, disk: Path) -> None:
        file = next((run / "index").glob("items-*"))
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
        reseal(file)

    return forge


def reseal(file: Path) -> None:
    """Make the checksums of a run match a file of it that was changed."""
    part = file.name.partition("-")[0]
    if part == "weights":
        model = file.with_name("model.json")
        write_json(model, read_json(model) | {"weights": sha256(file)})
    elif file.parent.name == "index" and part != file.name:
        manifest = manifest_of(file.parent)
        content = read_json(manifest)
        content["files"][part] = sha256(file)
        write_json(manifest, content)
    elif file.suffix == ".json":
        with suppress(AttributeError, TypeError, ValueError):  # it is no object any more
            content = json.loads(file.read_bytes())
            if content.pop("checksum", None) is not None:
                write_json(file, content)
        return
    else:
        return
    file.rename(file.with_name(f"{part}-{sha256(file)[:16]}{file.suffix}"))


def manifest_of(folder: Path) -> Path:
    """Return the manifest of an index, which is named after its model."""
    return next(path for path in folder.glob("*.json") if not path.name.startswith("items-"))


def moments(change: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    """Change the moments of the optimizer in the newest checkpoint."""

    def forge(run: Path, disk: Path) -> None:
        found = load_checkpoint(run / "checkpoints")
        assert found is not None
        tensors = {k: change(t) if "exp_avg" in k else t for k, t in found.tensors.items()}
        save_checkpoint(run / "checkpoints", found.step, tensors, found.state)

    return forge


def named(what: str) -> Forge:
    """Rename items of the index to something that is not a picture."""

    def forge(run: Path, disk: Path) -> None:
        os.mkfifo(disk / "pipe.png")
        sparse(disk / "sparse.png")
        folder, name = os.path.split(what.format(disk=disk))
        names = [f"{folder}/{n * './'}{name}" for n in range(32)]
        items(lambda i: {**i, "names": names})(run, disk)

    return forge


def learned(matrix: torch.Tensor) -> Forge:
    """Put a map into the index, as if it had been learned from feedback."""

    def forge(run: Path, disk: Path) -> None:
        index = FolderIndex.load(run / "index").with_map(matrix)
        index.commit(index.about)

    return forge


def said(content: bytes) -> Forge:
    """Write what nobody has said into the feedback."""
    return lambda run, disk: (run / FEEDBACK).write_bytes(content)


def deep(run: Path, disk: Path) -> None:
    """Write a text of very many nested brackets."""
    (run / "config.json").write_text("[" * 500_000)


NAN, MODEL, FEEDBACK = float("nan"), "model/model.json", "feedback.jsonl"
HEAD, VECTORS = ("model/weights-*", "head.weight"), ("index/vectors-*", "vectors")
RULES = ("unknown", "rerank")
"""What a model says about search, in its extra."""
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(RULES, (NAN, -1, "x", [], True, {"rule": "x"}, {"gains": {}})),
    "dim": (0, -1, 10**7, 10**12, 2.5, "4"),
    "channels": (0, 10**7, "3"),
    "size": (0, 3, 10**6, "16"),
    "std": ([0, 0, 0], [NAN] * 3, [1], "xyz"),
    "mode": ("L", "CMYK", 7),
    "preprocessing": (None,),
    "class_names": ([1, 2],),
}
TENSORS: dict[str, Forge] = {
    "NaN weights": tensor(*HEAD, lambda w: w * NAN),
    "weights that overflow": tensor(*HEAD, lambda w: torch.full_like(w, 3e38)),
    "weights of another shape": tensor(*HEAD, lambda w: w[:2]),
    "NaN vectors": tensor(*VECTORS, lambda v: v * NAN),
    "wide vectors": tensor(*VECTORS, lambda v: torch.cat([v, v], 1) / 2**0.5),
    "vectors of halves": tensor(*VECTORS, lambda v: v.half()),
    "long vectors": tensor(*VECTORS, lambda v: v * 1e30),
    "few vectors": tensor(*VECTORS, lambda v: v[:3]),
}
ITEMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "names twice": lambda i: i | {"names": ["x"] * len(i["names"])},
    "names that are numbers": lambda i: i | {"names": list(range(len(i["names"])))},
    "origins of nobody": lambda i: i | {"origins": [["x", "y"]] * len(i["names"])},
    "sources of nonsense": lambda i: i | {"sources": {"x": {"price": "money"}}},
    "no object": lambda i: [i],
    "control characters": lambda i: (
        i | {"names": [f"\x1b[31m{n}\r\n[b]x" for n in range(len(i["names"]))]}
    ),
}
PLACES = ("{disk}/pipe.png", "{disk}/sparse.png", "{disk}/pipe.png#0", "/dev/zero", "/proc/kmsg")
CONFIG: dict[str, Any] = {
    "seed": (-1, 10**30),
    "test_fraction": (NAN,),
    "data": ("/dev/zero", "/proc/self/fd"),
    "dim": (10**9,),
}
MARK = b'{"query": "%s", "item": "\\u001b[31m", "same": %s}\n'
SAID = {
    "nonsense": MARK % (b"x", b"7") + b"[" * 10**5 + b"\n\xff\n",
    "nobody": b"".join(MARK % (b"%d" % i, b"true") for i in range(9)),
    "a label": b'{"item": "\\ud800", "label": "x", "corrected": "\\u001b[31m"}\n',
}
MAPS = {"zeros": torch.zeros(4, 4), "another width": torch.eye(9), "NaN": torch.full((4, 4), NAN)}
LARGE = {
    "config.json": "search",
    MODEL: "search",
    "model/weights-*": "search",
    "index/*.json": "search",
    "index/items-*": "search",
    "index/vectors-*": "search",
    "proxies.safetensors": "evaluate",
    "scores.json": "evaluate",
    "metrics.jsonl": "evaluate",
    "checkpoints/step-4.safetensors": "train",
}
EVERY = "search embed evaluate index train"
ATTACKS = [
    *(Attack(f"{name} is a link", file_link(name), EVERY) for name in ("scores.json", LOCK)),
    *(Attack(f"{n}/ is a link", folder_link(n), EVERY) for n in ("index", "checkpoints", "model")),
    Attack("metrics.jsonl is a pipe", pipe, EVERY),
    Attack("feedback is a link", file_link(FEEDBACK), EVERY),
    Attack("feedback is a terabyte", lambda run, disk: sparse(run / FEEDBACK), "search index"),
    *(Attack(f"feedback of {what}", said(text), "search index") for what, text in SAID.items()),
    *(Attack(f"a map of {what}", learned(m), "search embed") for what, m in MAPS.items()),
    *(Attack(f"{n} is a terabyte of zeros", large(n), words) for n, words in LARGE.items()),
    *(
        Attack(f"model: {key} {value}", in_json(MODEL, **{key: value}), "search embed")
        for key, values in VALUES.items()
        for value in values
    ),
    *(Attack(name, forge, "search") for name, forge in TENSORS.items()),
    *(Attack(f"items: {name}", items(change), "search index") for name, change in ITEMS.items()),
    *(Attack(f"an item is {name}", named(name), "search") for name in PLACES),
    Attack("short moments", moments(lambda m: m[:1].clone()), "train"),
    Attack("flat moments", moments(lambda m: m.reshape(-1)), "train"),
    *(
        Attack(f"config: {key} {value}", in_json("config.json", **{key: value}), "evaluate train")
        for key, values in CONFIG.items()
        for value in values
    ),
    Attack("brackets without end", deep, "evaluate train"),
]
