"""What a change of the code must not move: scores, choices, losses, bits, features at seed 0.

    python -m benchmarks.golden DATA [--only CASE …]          compare with results/golden.json
    python -m benchmarks.golden DATA [--only CASE …] --write  replace what it holds of these cases

DATA is a folder with CUB_200_2011, flowers_20 and caltech_20; a case whose data are not there is
skipped. Everything runs in one thread and with a cache of its own, so numbers do not depend on the
machine's load or on an earlier run. They do depend in their last digits on the processor's kind,
which is stored beside them: on another kind write them anew at the commit before the change. A
difference is explained or a bug. Exit code 1 where one is found.
"""

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "golden.json"
SCORES = ("recall@1", "map@r", "nmi", "ordered")
Case = Callable[[Path, Path], dict[str, Any]]


def of_command(*words: object, out: Path) -> dict[str, Any]:
    """Run a command of nofuss that trains; return what it scored."""
    command = [sys.executable, "-m", "nofuss", *map(str, words), "--out", str(out), "--seed", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    scores = json.loads((out / "scores.json").read_text())
    found = {name: scores[name] for name in SCORES if name in scores}
    for name, values in scores.get("baselines", {}).items():
        found |= {f"{name}: {score}": values[score] for score in SCORES if score in values}
    return found


def demo(data: Path, scratch: Path) -> dict[str, Any]:
    """Train the small convnet on the built-in characters."""
    return of_command("demo", out=scratch / "run")


def cub(data: Path, scratch: Path) -> dict[str, Any]:
    """Train on the official half of CUB."""
    return of_command("train", data / "CUB_200_2011", out=scratch / "run")


def flowers(data: Path, scratch: Path) -> dict[str, Any]:
    """Train on half of the flowers."""
    return of_command("train", data / "flowers_20", out=scratch / "run")


def caltech(data: Path, scratch: Path) -> dict[str, Any]:
    """Train on half of Caltech's classes."""
    return of_command("train", data / "caltech_20", out=scratch / "run")


def finetune(data: Path, scratch: Path) -> dict[str, Any]:
    """Fine-tune the last stage on half of the flowers."""
    words = ("train", data / "flowers_20", "--preset", "finetune")
    return of_command(*words, out=scratch / "run")


def triplets(data: Path, scratch: Path) -> dict[str, Any]:
    """Train on a CSV of triplets of flowers."""
    import numpy as np

    classes = sorted(path for path in (data / "flowers_20").iterdir() if path.is_dir())[:40]
    pictures = [sorted(folder.iterdir()) for folder in classes]
    random = np.random.default_rng(0)
    with (scratch / "triplets.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("anchor", "positive", "negative"))
        for _ in range(1500):
            one, other = random.choice(len(classes), 2, replace=False)
            anchor, positive = random.choice(len(pictures[one]), 2, replace=False)
            negative = random.choice(len(pictures[other]))
            table.writerow(
                (pictures[one][anchor], pictures[one][positive], pictures[other][negative])
            )
    return of_command("train", scratch / "triplets.csv", out=scratch / "run")


def estimator(data: Path, scratch: Path) -> dict[str, Any]:
    """Fit `ProxyEmbedding` on digits and on vectors whose leading directions are noise."""
    from benchmarks.worth import built_in
    from nofuss import ProxyEmbedding

    found = {}
    for task in built_in():
        for options in ({}, {"dim": 16}, {"loss": "proxy-anchor"}):
            fitted = ProxyEmbedding(**options).fit(task.x.numpy(), task.y.numpy())
            name = f"{task.name} {options or 'defaults'}"
            found[f"{name}: recall@1"] = fitted.score(task.test_x.numpy(), task.test_y.numpy())
            found[f"{name}: {fitted.choice_.kept}, dim"] = len(fitted.components_)
    return found


def curve(data: Path, scratch: Path) -> dict[str, Any]:
    """Return the losses of 60 steps of a head that is trained on vectors."""
    import numpy as np

    import nofuss

    random = np.random.default_rng(0)
    labels = np.arange(20).repeat(24)
    vectors = random.normal(size=(20, 48))[labels] + random.normal(size=(480, 48))
    losses = list[float]()
    nofuss.train(
        (vectors.astype(np.float32), labels),
        out=scratch / "run",
        epochs=15,
        batch_size=60,
        test_fraction=0.5,
        callback=lambda event: (
            losses.append(event.values["loss"]) if event.kind == "step" else None
        ),
    )
    return {f"step {i + 1}": loss for i, loss in enumerate(losses)}


def bits(data: Path, scratch: Path) -> dict[str, Any]:
    """Return the SHA-256 of a convnet's weights, trained whole and in twelve pieces."""
    import numpy as np

    import nofuss

    random = np.random.default_rng(0)
    shapes = random.integers(0, 256, (12, 20, 20))
    labels = np.arange(12).repeat(10)
    pictures = (shapes[labels] * 0.7 + random.integers(0, 77, (120, 20, 20))).astype(np.uint8)

    def run(out: Path, pause: int | None) -> bool:
        """Train until the end, or for `pause` steps; return whether the end was reached."""
        steps = 0

        def stop(event: Any) -> None:
            nonlocal steps
            steps += event.kind == "step"
            if event.kind == "step" and steps == pause:
                signal.raise_signal(signal.SIGINT)

        resume = (out / "config.json").is_file()
        settings: dict[str, Any] = (
            {} if resume else {"epochs": 6, "batch_size": 15, "preset": "small"}
        )
        try:
            nofuss.train((pictures, labels), out=out, resume=resume, callback=stop, **settings)
        except KeyboardInterrupt:
            return False
        return True

    run(scratch / "whole", None)
    pieces = [2, 1, 3, 1, 1, 2, 1, 2, 1, 1, 2]
    interruptions = sum(not run(scratch / "pieces", pause) for pause in pieces)
    run(scratch / "pieces", None)
    found = {name: weights_digest(scratch / name) for name in ("whole", "pieces")}
    return {"interruptions": interruptions, **found}


def weights_digest(run: Path) -> str:
    """Return the SHA-256 of all weights of a run's model."""
    import nofuss

    made = hashlib.sha256()
    for name, value in sorted(nofuss.load(run).embedder.state_dict().items()):
        made.update(name.encode() + value.numpy().tobytes())
    return made.hexdigest()


def features(data: Path, scratch: Path) -> dict[str, Any]:
    """Return the SHA-256 of the features of 200 flowers, and a projection of each."""
    import numpy as np

    from benchmarks.worth import features_by
    from nofuss.data.open import open_data

    collection = open_data(data / "flowers_20")
    chosen = collection.subset(np.arange(0, len(collection), len(collection) // 200)[:200])
    found = features_by("efficientnet-lite0", chosen).numpy()
    digest = hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
    probe = np.random.default_rng(0).normal(size=found.shape[1]) / 10
    return {"sha256": digest} | {f"picture {i}": float(row @ probe) for i, row in enumerate(found)}


CASES: dict[str, tuple[Case, str]] = {
    "estimator": (estimator, ""),
    "curve": (curve, ""),
    "bits": (bits, ""),
    "features": (features, "flowers_20"),
    "triplets": (triplets, "flowers_20"),
    "flowers": (flowers, "flowers_20"),
    "caltech": (caltech, "caltech_20"),
    "demo": (demo, ""),
    "finetune": (finetune, "flowers_20"),
    "cub": (cub, "CUB_200_2011"),
}
"""Name → how to compute it, and the folder of DATA that it needs."""


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each value that is not what it was."""
    found = list[str]()
    for name in {**before, **now}:
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if old != new:
            both = all(isinstance(value, float) for value in (old, new))
            moved = f" (moved by {new - old:+.2g})" if both else ""
            found.append(f"{name}: {old} → {new}{moved}")
    return found


def processor() -> str:
    """Return the instructions that torch uses here: they decide how sums are rounded."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def main() -> int:
    """Compute the cases; compare them with the stored results, or store them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    moved, kind = False, processor()
    if options.write:
        stored["processor"] = kind
    if stored.get("processor") != kind:
        print(f"the stored numbers are of {stored.get('processor')}, this processor has {kind}")
    for name in options.only:
        compute, needed = CASES[name]
        if not (options.data / needed).is_dir():
            print(f"{name}: skipped, {options.data / needed} is missing", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["NOFUSS_CACHE"] = f"{scratch}/cache"
            now = json.loads(json.dumps(compute(options.data.absolute(), Path(scratch))))
        lines = differences(stored.get(name, {}), now)
        moved |= bool(lines)
        print(f"{name}: {len(now)} values, {len(lines)} moved", *lines[:10], sep="\n  ", flush=True)
        stored[name] = now
        if options.write:
            RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    return int(moved and not options.write)


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # before torch is loaded
        single = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        words = [sys.executable, "-m", "benchmarks.golden", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | single)
    sys.exit(main())
