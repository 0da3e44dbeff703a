"""The proxies that a run keeps, and the sample of training items that they stand for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nofuss.data.open import open_usable
from nofuss.errors import RunError
from nofuss.model.embedder import embed_features
from nofuss.model.encoder import load
from nofuss.model.features import features_of
from nofuss.run.proxies import FILE, RunProxies, load_proxies, sample_by_class
from nofuss.training.checkpoint import load_checkpoint
from tests.tiny_run import train_pictures


def kept_of(run: Path) -> RunProxies:
    encoder = load(run)
    return load_proxies(run, encoder.digest, encoder.dim)


def test_they_are_the_models(picture_run: Path) -> None:
    kept, collection = kept_of(picture_run), open_usable(picture_run.parent / "data")
    classes = np.unique(collection.labels[kept.sample], return_inverse=True)[1]
    assert kept.assignment.tolist() == classes.tolist()  # static: a proxy is its class
    np.testing.assert_allclose(np.linalg.norm(kept.proxies, axis=1), 1, atol=1e-5)
    assert not len(load_proxies(picture_run, "another model", kept.proxies.shape[1]).proxies)


@pytest.mark.slow
def test_free_norms_assign_as_training_does(tmp_path: Path) -> None:
    """p(x) is the closest proxy of x as it is: the closest direction is often another one."""
    options = {"assignment": "dynamic", "proxies_per_class": 2.0, "free_norms": True}
    run = train_pictures(tmp_path, epochs=2, proxy_lr=0.5, start="random", **options)
    kept, checkpoint = kept_of(run), load_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    proxies = checkpoint.tensors["criterion.proxies"]
    collection = open_usable(tmp_path / "data")
    encoder = load(run)
    features = features_of(encoder.embedder.backbone, collection.subset(kept.sample)).values
    raw = embed_features(encoder.embedder, features)
    closest = torch.cdist(raw, proxies).argmin(1)
    assert kept.assignment.tolist() == closest.tolist()
    by_direction = (raw.numpy() @ kept.proxies.T).argmax(1)
    assert kept.assignment.tolist() != by_direction.tolist()


@pytest.mark.parametrize("content", [b"", b"{}", bytes(100)])
def test_damage_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        load_proxies(tmp_path, "m", 4)


def test_a_sample_holds_whole_classes() -> None:
    labels = np.random.default_rng(1).integers(0, 50, 2000)
    chosen = sample_by_class(labels, items=300, per_class=100)
    assert len(chosen) <= 300
    assert np.all(np.diff(chosen) > 0)
    for c in np.unique(labels[chosen]):
        assert (labels[chosen] == c).sum() == (labels == c).sum()
    capped = sample_by_class(labels, items=300, per_class=5)
    assert np.unique(labels[capped], return_counts=True)[1].max() == 5
    assert (
        sample_by_class(labels, items=300).tolist() == sample_by_class(labels, items=300).tolist()
    )
    assert len(sample_by_class(np.full(10, -1), items=4)) == 4
    assert len(sample_by_class(np.empty(0, np.int64))) == 0


@pytest.mark.parametrize(
    "changes",
    [{"proxies": np.eye(5, dtype=np.float32)[:2]}, {"assignment": np.array([0, 1])}],
)
def test_what_does_not_fit_together_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = RunProxies(np.eye(4, dtype=np.float32)[:2], np.arange(3), np.array([0, 1, 1]), 16.0)
    whole.save(tmp_path, "m")
    assert load_proxies(tmp_path, "m", 4).scale == 16.0
    replace(whole, **changes).save(tmp_path, "m")
    with pytest.raises(RunError, match="fit"):
        load_proxies(tmp_path, "m", 4)
