"""Proxy-NCA against the paper's four baselines on Omniglot, all with the same time.

    python -m benchmarks.omniglot FILE.npz --seconds 90

The small convnet, one thread, so that CPU time is wall-clock time on a free core and a busy machine
changes nothing. Proxy-NCA takes shuffled batches of 32; the baselines 128, as in the paper, with
four items a class (N-pairs two). Each method gets the same tries: three rates, compared by Recall@1
on a fifth of the *training* classes after a third of the time. Rates fall to zero as a cosine over
the time. The evaluation classes are used only for the final scores.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nofuss.config import Options
from nofuss.data.collection import Collection
from nofuss.data.open import TrainingData, open_data
from nofuss.data.split import split_classes, split_collection
from nofuss.evaluate import evaluate, recall_at_k
from nofuss.model.embedder import Embedder
from nofuss.model.encoder import Encoder
from nofuss.training.criterion import build_criterion
from nofuss.training.feed import Batches
from nofuss.training.loop import Training, set_rates, train_step
from nofuss.training.network import build_model
from nofuss.training.settings import resolve

METHODS = {  # name → (batch, items a class)
    "proxy-nca": (32, 0),
    "semi-hard": (128, 4),
    "lifted": (128, 4),
    "n-pairs": (128, 2),
    "clustering": (128, 4),
}
RATES = (3e-4, 1e-3, 3e-3)


def fit(
    method: str, rate: float, data: Collection, *, seconds: float, seed: int
) -> tuple[Embedder, int]:
    """Train for `seconds` of CPU time, loading included; return the model and its steps."""
    batch, per_class = METHODS[method]
    asked = Options(
        preset="small", loss=method, lr=rate, head_lr=rate, proxy_lr=10 * rate, seed=seed
    )
    opened = TrainingData(data, None, None, "")
    embedder = build_model(asked, "small", data, side=opened.side)
    settings = resolve(asked, opened, embedder.backbone)
    training = Training.of(
        settings,
        embedder,
        build_criterion(settings, data.num_classes, embedder.dim),
        backbone=embedder.backbone_parameters(),
        head=embedder.head.parameters(),
    )
    settings = replace(settings, batch_size=batch, per_class=per_class)
    feed = Batches(data, embedder.backbone.preprocessing, settings)
    embedder.train()
    steps, epoch, start = 0, 0, time.process_time()
    while True:
        for items in feed(epoch, 0):
            spent = (time.process_time() - start) / seconds
            if spent >= 1:
                return embedder, steps
            set_rates(training.optimizer, "cosine", spent, 1)
            train_step(embedder, training.criterion, training.optimizer, items)
            steps += 1
        epoch += 1


def choose_rate(method: str, data: Collection, *, seconds: float, seed: int) -> float:
    """Return the rate with the best Recall@1 on held-out training classes."""
    kept, held = map(data.subset, split_classes(data.labels, fraction=0.2, seed=seed))
    found = {}
    for rate in RATES:
        embedder, _ = fit(method, rate, kept, seconds=seconds, seed=seed)
        embeddings = Encoder(embedder).embed_collection(held)
        found[rate] = recall_at_k(embeddings, held.labels, ks=(1,))[1]
    print(
        f"  {method}: held-out Recall@1 " + ", ".join(f"{r:g}: {v:.3f}" for r, v in found.items())
    )
    return max(found, key=lambda rate: found[rate])


def main() -> None:
    """Choose rates, train and score; print a table and write a JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/omniglot.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    collection = open_data(options.data)
    print(collection.describe())
    train_rows, test_rows = split_collection(collection)
    data = replace(collection.subset(train_rows), split=None)
    test = collection.subset(test_rows)
    assert test.array is not None
    pixels = torch.from_numpy(test.array.reshape(len(test), -1)).float()
    rows: list[dict[str, Any]] = [
        {"method": "raw pixels"} | evaluate(pixels, test.labels).as_dict()
    ]
    for method in METHODS:
        rate = choose_rate(method, data, seconds=options.seconds / 3, seed=0)
        for seed in range(options.seeds):
            model, steps = fit(method, rate, data, seconds=options.seconds, seed=seed)
            embeddings = Encoder(model).embed_collection(test)
            scores = evaluate(embeddings, test.labels).as_dict()
            rows.append({"method": method, "rate": rate, "seed": seed, "steps": steps} | scores)
            low, high = scores["recall@1_interval"]
            print(
                f"{method:12} rate {rate:g} {steps:5} steps  R@1 {scores['recall@1']:.4f} "
                f"({low:.4f}–{high:.4f})  NMI {scores['nmi']:.4f}",
                flush=True,
            )
    low, high = rows[0]["recall@1_interval"]
    print(f"raw pixels   R@1 {rows[0]['recall@1']:.4f} ({low:.4f}–{high:.4f})")
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
