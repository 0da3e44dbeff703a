"""The embeddings that a run keeps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nofuss.data.open import open_usable
from nofuss.errors import RunError
from nofuss.model.encoder import load
from nofuss.run.embeddings import (
    FILE,
    RunEmbeddings,
    load_embeddings,
    sample_by_class,
    without_sample,
)
from nofuss.training.checkpoint import load_checkpoint
from tests.tiny_run import train_pictures


def test_they_are_the_models(picture_run: Path) -> None:
    kept = load_embeddings(picture_run)
    assert kept is not None
    collection, _ = open_usable(picture_run.parent / "data")
    assert kept.fingerprint == collection.fingerprint()
    encoder = load(picture_run)
    for vectors, rows in ((kept.test, kept.test_rows), (kept.sample, kept.sample_rows)):
        again = encoder.embed_collection(collection.subset(rows)).numpy()
        np.testing.assert_allclose(vectors, again, atol=1e-5)
    classes = np.unique(collection.labels[kept.sample_rows], return_inverse=True)[1]
    assert kept.assignment.tolist() == classes.tolist()  # static: a proxy is its class
    np.testing.assert_allclose(np.linalg.norm(kept.proxies, axis=1), 1, atol=1e-5)


def test_free_norms_assign_as_training_does(tmp_path: Path) -> None:
    """p(x) is the closest proxy of x as it is: the closest direction is often another one."""
    options = {"assignment": "dynamic", "proxies_per_class": 2.0, "free_norms": True}
    run = train_pictures(tmp_path, epochs=2, proxy_lr=0.5, start="random", **options)
    kept, checkpoint = load_embeddings(run), load_checkpoint(run / "checkpoints")
    assert kept is not None
    assert checkpoint is not None
    proxies = checkpoint.tensors["criterion.proxies"]
    collection, _ = open_usable(tmp_path / "data")
    raw = load(run).embed_collection(collection.subset(kept.sample_rows), unit=False)
    closest = torch.cdist(raw, proxies).argmin(1)
    assert kept.assignment.tolist() == closest.tolist()
    by_direction = (kept.sample @ kept.proxies.T).argmax(1)
    assert kept.assignment.tolist() != by_direction.tolist()


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    assert load_embeddings(tmp_path) is None
    kept = without_sample("f", 3)
    kept.save(tmp_path)
    again = load_embeddings(tmp_path)
    assert again is not None
    assert (again.fingerprint, again.scale) == ("f", None)
    assert again.test.shape == (0, 3)


@pytest.mark.parametrize("content", [b"", b"{}", bytes(100)])
def test_damage_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        load_embeddings(tmp_path)


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


def some(**changes: object) -> RunEmbeddings:
    """Two test items, three of a sample with two proxies; and what is changed."""
    vectors = np.eye(4, dtype=np.float32)
    whole = RunEmbeddings(
        fingerprint="f",
        test=vectors[:2],
        test_rows=np.arange(2),
        sample=vectors[:3],
        sample_rows=np.arange(3),
        proxies=vectors[:2],
        assignment=np.array([0, 1, 1]),
        scale=16.0,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"test": np.full((2, 4), np.nan, np.float32)}, "test holds NaN or infinity"),
        ({"test": np.eye(4)[:2]}, "test is float64"),
        ({"sample": np.eye(5, dtype=np.float32)[:3]}, r"sample is float32 \(3, 5\)"),
        ({"test_rows": np.array([0])}, r"expected int64 \(2,\)"),
        ({"sample_rows": np.array([0, -1, 2])}, "sample_rows is int64"),
        ({"sample_rows": np.array([0.0, 1, 2])}, "sample_rows is float64"),
        ({"assignment": np.array([0, 1, 2])}, "assignment names proxies that do not exist"),
        ({"scale": float("nan")}, "its scale is nan"),
        ({"fingerprint": 7}, "its fingerprint is not a string"),
    ],
)
def test_what_does_not_fit_together_is_one_line(
    changes: dict[str, object], complaint: str | None, tmp_path: Path
) -> None:
    some(**changes).save(tmp_path)
    if complaint is None:
        assert load_embeddings(tmp_path) is not None
        return
    with pytest.raises(RunError, match=f"is damaged .*{complaint}"):
        load_embeddings(tmp_path)
