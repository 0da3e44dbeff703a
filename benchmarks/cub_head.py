"""A 64-d head on frozen CUB features: Proxy-NCA beside pytorch-metric-learning's proxy losses.

    python -m benchmarks.cub_head CUB_200_2011

Every loss gets the same features (roots of EfficientNet-Lite0's pooled activations), the same
head (started at their PCA), optimizer, batch, epochs, schedule and number of tries: four scales,
five rates, proxies at the class means or at random. Tries are compared by Recall@1 on the other
half of the *training* classes, both ways; CUB lists relatives side by side, so halves hold out
whole families, as its test classes do. The best try of each is then scored on the test classes,
five seeds, last epoch.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from nofuss import ProxyNCA, nmi, recall_at_k
from nofuss.data import open_data
from nofuss.features import backbone_features
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder, principal_components
from nofuss.presets import PRESETS
from nofuss.train.optim import build_optimizer, set_rates
from nofuss.train.setup import start_from_data

DIM, SEEDS, KS = 64, 5, (1, 2, 4, 8)
PRESET = PRESETS["frozen"]
LOSSES = ("ours ProxyNCA", "PML ProxyNCALoss", "PML ProxyAnchorLoss", "PML NormalizedSoftmaxLoss")


@dataclass(frozen=True)
class Try:
    """What the grid varies; the defaults are the frozen preset's."""

    loss: str = "ours ProxyNCA"
    scale: float = PRESET["scale"]
    """Factor of the cosines in the exponent, whatever the loss calls it."""
    rate: float = PRESET["head_rate"]
    proxies: str = "means"
    proxy_rate: float = PRESET["proxy_rate"]


def grid(loss: str) -> Iterator[Try]:
    """The same tries for every loss."""
    starts = (("means", 1e-3), ("random", 1e-2))
    for scale, rate, (proxies, proxy_rate) in product(
        (4.0, 8.0, 16.0, 32.0), (3e-5, 1e-4, 3e-4, 1e-3, 3e-3), starts
    ):
        yield Try(loss, scale, rate, proxies, proxy_rate)


def criterion_of(t: Try, proxies: Tensor) -> nn.Module:
    """The loss, its proxies at `proxies` (C, D)."""
    c = len(proxies)
    criterion: nn.Module
    if t.loss == "ours ProxyNCA":
        criterion = ProxyNCA(c, DIM, scale=t.scale)
    elif t.loss == "PML ProxyNCALoss":  # its logit is −softmax_scale·|x − p|²
        criterion = pml.ProxyNCALoss(c, DIM, softmax_scale=t.scale / 2)
    elif t.loss == "PML ProxyAnchorLoss":
        criterion = pml.ProxyAnchorLoss(c, DIM, alpha=t.scale)
    else:
        criterion = pml.NormalizedSoftmaxLoss(c, DIM, temperature=1 / t.scale)
    with torch.no_grad():
        own = next(criterion.parameters())
        own.copy_(proxies if own.shape == proxies.shape else proxies.T)
    return criterion


def fit(x: Tensor, y: Tensor, t: Try, *, seed: int) -> nn.Linear:
    """The head after the last epoch of the frozen preset's schedule."""
    batch, epochs = int(PRESET["batch"]), int(PRESET["epochs"])
    head, start = nn.Linear(x.shape[1], DIM), ProxyNCA(int(y.max()) + 1, DIM, seed=seed)
    random = start.proxies.detach().clone()
    start_from_data(head, start, x, y, center=bool(PRESET["center"]))
    criterion = criterion_of(t, start.proxies.detach() if t.proxies == "means" else random)
    optimizer = build_optimizer(
        "adam",
        backbone=(),
        head=head.parameters(),
        proxies=criterion.parameters(),
        rate=0,
        head_rate=t.rate,
        proxy_rate=t.proxy_rate,
    )
    generator = torch.Generator().manual_seed(seed)
    steps = len(x) // batch
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator)[: steps * batch]
        for step, rows in enumerate(order.view(steps, batch)):
            set_rates(optimizer, str(PRESET["schedule"]), epoch + step / steps, epochs)
            optimizer.zero_grad()
            criterion(head(x[rows]), y[rows]).backward()
            optimizer.step()
    return head


def choose(halves: list[tuple[Tensor, Tensor]], loss: str) -> Try:
    """The try with the best mean Recall@1 on the half it was not trained on."""
    found: dict[Try, float] = {}
    for t in grid(loss):
        scores = []
        for own, other in (halves, halves[::-1]):
            head = fit(*own, t, seed=0)
            with torch.no_grad():
                scores.append(recall_at_k(head(other[0]), other[1], ks=(1,))[1])
        found[t] = mean(scores)
    best = max(found, key=lambda t: found[t])
    print(f"{loss}: held-out Recall@1 {100 * found[best]:.2f} with {best}", flush=True)
    return best


def main() -> None:
    """Choose on training classes, then score once on test classes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cub", type=Path)
    collection = open_data(parser.parse_args().cub)
    embedder = build_embedder("efficientnet-lite0", root=bool(PRESET["root"]))
    assert embedder.backbone.preprocessing is not None
    assert collection.labels is not None
    raw = backbone_features(embedder, collection, embedder.backbone.preprocessing)
    x, y = embedder.to_head(raw), torch.from_numpy(collection.labels)
    torch.set_num_threads(1)  # batches are small

    def classes(first: int, last: int) -> tuple[Tensor, Tensor]:
        rows = (y >= first) & (y < last)
        return x[rows], y[rows] - first

    halves = [classes(0, 50), classes(50, 100)]
    tries = {"ours ProxyNCA, the preset": Try()}
    tries |= {f"{loss}, best try": choose(halves, loss) for loss in LOSSES}
    train, (test, labels) = classes(0, 100), classes(100, 200)
    test_raw = raw[y >= 100]

    def show(name: str, embeddings: list[Tensor]) -> None:
        rows = [
            [*recall_at_k(e, labels, ks=KS).values(), nmi(e, labels, seed=i)]
            for i, e in enumerate(embeddings)
        ]
        cells = [
            f"{100 * mean(c):.2f}" + (f" ± {100 * stdev(c):.2f}" if len(c) > 1 else "")
            for c in zip(*rows, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)

    print("| | " + " | ".join(f"R@{k}" for k in KS) + " | NMI |\n" + "|---" * (len(KS) + 2) + "|")
    show("untrained features, 1280-d", [test_raw])
    mean_raw, directions = principal_components(raw[y < 100], DIM)
    show("their PCA, 64-d", [(test_raw - mean_raw) @ directions.T])
    show("roots of the features, 1280-d", [test])
    show("their PCA, 64-d: the head's start", [test @ principal_components(train[0], DIM)[1].T])
    for name, t in tries.items():
        heads = [fit(*train, t, seed=seed) for seed in range(SEEDS)]
        with torch.no_grad():
            show(name, [normalize(head(test)) for head in heads])


if __name__ == "__main__":
    main()
