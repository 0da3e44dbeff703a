"""Run directories of another version, data set or owner; flags that would be ignored."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nofuss.cli import main
from nofuss.files import read_json, write_by_content, write_json
from tests.rubbish.catalogue import CATALOGUE, arrays, finished, resume, rubbish

# Runs


@rubbish("a run of a later version", 2, "has settings of another version: colour")
def _(here: Path) -> list[object]:
    run = finished(here)
    write_json(run / "config.json", read_json(run / "config.json") | {"colour": 3})
    return resume(run)


@rubbish("a model of a later version", 2, "has format 99, expected 3; open it with the version of")
def _(here: Path) -> list[object]:
    model = finished(here) / "model"
    write_json(model / "model.json", read_json(model / "model.json") | {"format": 99})
    return ["evaluate", here / "run"]


@rubbish("a run of other data", 2, "the data differ from what")
def _(here: Path) -> list[object]:
    run = finished(here)
    arrays(here, vectors=np.ones((40, 6)), labels=np.repeat(np.arange(8), 5))
    return resume(run)


@rubbish("a run of other settings", 2, "was made with other settings (epochs 1 → 7, dim 4 → 3)")
def _(here: Path) -> list[object]:
    return resume(finished(here), "--dim", 3, "--epochs", 7)


@rubbish(
    "other settings that are the defaults",
    2,
    "other settings (loss nca → proxy-nca)",
)
def _(here: Path) -> list[object]:
    run = finished(here)
    config = read_json(run / "config.json")
    write_json(run / "config.json", config | {"loss": "nca", "per_class": 4, "scale": None})
    return resume(run, "--loss", "proxy-nca")


@rubbish("a checkpoint that is a pickle in disguise", 0, "no intact checkpoint to resume from")
def _(here: Path) -> list[object]:
    run = finished(here)
    for step in (run / "checkpoints").iterdir():
        step.write_bytes(pickle.dumps(Trap(here / "sprung")))
    return resume(run)


@rubbish("weights that are a pickle in disguise", 2, "is damaged (Error while deserializing")
def _(here: Path) -> list[object]:
    model = finished(here) / "model"
    trap = pickle.dumps(Trap(here / "sprung"))
    checksum = write_by_content(model, "weights", "safetensors", trap)
    write_json(model / "model.json", read_json(model / "model.json") | {"weights": checksum})
    return ["evaluate", here / "run"]


@rubbish("a configuration that names a path outside", 0, "run directory")
def _(here: Path) -> list[object]:
    run = finished(here)
    write_json(run / "config.json", read_json(run / "config.json") | {"out": str(here / "outside")})
    return resume(run)


@rubbish("an index that names a path outside", 2, "is damaged")
def _(here: Path) -> list[object]:
    run = finished(here)
    assert main(["index", str(run)]) == 0
    manifest = run / "index" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["sha256"]["items"] = "../../../../etc/passwd"
    manifest.write_text(json.dumps(content))
    return ["search", run, here / "x.npz"]


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.mark,))


# Flags that would be ignored


CATALOGUE |= {
    "a rate for a backbone that stays": (
        lambda here: [*arrays(here, vectors=np.eye(4), labels=[0, 1, 2, 3]), "--lr", "0.1"],
        2,
        "--lr needs a trainable backbone, and this one is fixed; drop it",
    ),
    "a scale for a loss without one": (
        lambda here: [
            *arrays(here, vectors=np.eye(8), labels=np.arange(8) // 2),
            *("--scale", "8", "--loss", "triplet"),
        ],
        2,
        "--scale is for losses over proxies; drop it",
    ),
    "more proxies than memory": (
        lambda here: [
            *arrays(here, vectors=np.eye(8), labels=np.arange(8) // 2),
            *("--proxies-per-class", "1e9"),
        ],
        2,
        "lower --proxies-per-class or --dim",
    ),
}
