"""Recall@1 on unseen classes against minutes: head alone, last stages, whole network.

    python -m benchmarks.finetune CUB_200_2011 --out FOLDER
    python -m benchmarks.finetune CUB_200_2011 --out FOLDER --only "head" "2 stages" --dim 64

Every row is one `nofuss train` as a user starts it, with an empty cache, in its own process: its
minutes are those of the processor from its start to its scores, features and kept activations
included, which hardly depend on what else the machine does; two idle cores take little more than
half of them. Rows that are in FOLDER already are not run again. The whole network has a row for
each number of `--epochs-all`, the first epoch of its head alone. Settings are the defaults, and
stages learn from all training classes (`--val-fraction 0`), as the head does: nothing is chosen on
the classes that are scored.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROWS: dict[str, tuple[str, ...]] = {
    "head": ("--preset", "frozen"),
    "head, 288 px": ("--preset", "frozen", "--size", "288"),
    "1 stage": ("--preset", "finetune", "--val-fraction", "0", "--unfreeze", "1"),
    "2 stages": ("--preset", "finetune", "--val-fraction", "0"),
    "3 stages": ("--preset", "finetune", "--val-fraction", "0", "--unfreeze", "3"),
    "all": ("--preset", "finetune", "--val-fraction", "0", "--unfreeze", "all"),
}


def measure(name: str, data: Path, home: Path, words: list[str]) -> dict[str, Any]:
    """Run one row, or read what it gave before; return its scores and costs."""
    folder = home / name.replace(" ", "-")
    kept = folder / "row.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        if found["flags"] == " ".join(words):
            return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "nofuss", "train", str(data), "--out", str(folder / "run")]
    environment = os.environ | {"NOFUSS_CACHE": str(folder / "cache")}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (folder / "said.txt").open("w") as said:
        subprocess.run(
            [*command, *words], env=environment, stdout=said, stderr=subprocess.STDOUT, check=True
        )
    minutes = (time.monotonic() - began) / 60
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(getattr(after, t) - getattr(before, t) for t in ("ru_utime", "ru_stime")) / 60
    scores = json.loads((folder / "run" / "scores.json").read_text())
    activations = sum(file.stat().st_size for file in (folder / "cache").glob("activations-*"))
    row = {
        "flags": " ".join(words),
        "minutes": minutes,
        "cpu minutes": cpu,
        "recall@1": scores["recall@1"],
        "map@r": scores["map@r"],
        "gigabytes": activations / 2**30,
        "untrained": next(iter(scores["baselines"].values()))["recall@1"],
    }
    kept.write_text(json.dumps(row, indent=2))
    shutil.rmtree(folder / "cache")
    return row


def draw(rows: dict[str, dict[str, Any]], path: Path, title: str) -> None:
    """Draw Recall@1 against minutes of one core, a point a row."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    level = 100 * next(iter(rows.values()))["untrained"]
    for name, row in rows.items():
        x, y = row["cpu minutes"], 100 * row["recall@1"]
        axes.plot(x, y, "o", color="black")
        beside = (6, 4 if y > level else -12)
        axes.annotate(name, (x, y), xytext=beside, textcoords="offset points", fontsize=9)
    axes.axhline(level, color="0.6", linestyle="--")
    axes.annotate(
        "untrained, 1280-d",
        (0.99, level),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=9,
    )
    axes.set_xlim(0, 1.15 * max(row["cpu minutes"] for row in rows.values()))
    axes.set_xlabel("minutes of one core")
    axes.set_ylabel("Recall@1 on unseen classes, %")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print the table and write the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--dim", type=int)
    parser.add_argument("--epochs-all", type=int, nargs="+", default=[2])
    asked = parser.parse_args()
    wanted = {name: list(ROWS[name]) for name in asked.only if name != "all"}
    for epochs in asked.epochs_all if "all" in asked.only else ():
        wanted[f"all, {epochs} epochs"] = [*ROWS["all"], "--epochs", str(epochs)]
    rows = {}
    for name, words in wanted.items():
        words += ["--dim", str(asked.dim)] if asked.dim else []
        label = name if asked.dim is None else f"{name} {asked.dim}-d"
        rows[name] = measure(label, asked.data, asked.out, words)
        print(f"{label}: {rows[name]}", flush=True)
    print("\n| trained | flags | R@1 | MAP@R | minutes | CPU minutes | kept GB |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        scores = " | ".join(f"{100 * row[each]:.2f}" for each in ("recall@1", "map@r"))
        costs = " | ".join(f"{row[each]:.1f}" for each in ("minutes", "cpu minutes", "gigabytes"))
        print(f"| {name} | `{row['flags']}` | {scores} | {costs} |")
    dim = f"{asked.dim}-d" if asked.dim else "default dimension"
    draw(rows, asked.out / "finetune.png", f"{asked.data.name}, {dim}")


if __name__ == "__main__":
    main()
