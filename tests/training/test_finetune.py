"""Fine-tuning the last stages on kept activations: what moves, what is kept, and the same bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nofuss
from nofuss.config import Preprocessing, read_as
from nofuss.data.loader import batches
from nofuss.data.readers.arrays import from_arrays
from nofuss.errors import UsageError
from nofuss.geometry import normalize
from nofuss.model.activations import activations_of, top_features
from nofuss.model.embedder import build_embedder
from nofuss.model.features import features_of
from nofuss.model.saved import model_files
from nofuss.model.stages import Trunk
from nofuss.model.whitening import Recipe
from nofuss.run.choice import CLOSED, Choice
from nofuss.run.proxies import load_proxies
from nofuss.training.feed import Batches
from nofuss.training.finetune import TRAINED_SHRINKAGE, after_training, labels_of, prepare
from nofuss.training.head import fit_head
from nofuss.training.loop import run_loop
from tests.asked import settings_of


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Twelve classes of five noisy pictures of 32 pixels."""
    random = np.random.default_rng(0)
    labels = np.arange(60) % 12
    drawn = random.integers(0, 256, (12, 32, 32, 3))
    noisy = drawn[labels] + random.integers(-60, 60, (60, 32, 32, 3))
    return noisy.clip(0, 255).astype(np.uint8), labels


SETTINGS: dict[str, Any] = {
    "preset": "finetune",
    "backbone": "convnet",
    "size": 32,
    "epochs": 3,
    "batch_size": 8,
    "views": 2,
    "dim": 16,
    "test_fraction": 0.25,
    "val_fraction": 0.0,
    "start": "pca",
}


pytestmark = pytest.mark.usefixtures("cache")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(model_files(run / "model")[1])


@pytest.mark.slow
@pytest.mark.parametrize("unfreeze", [2, "all"])
def test_only_the_last_stages_move(tmp_path: Path, cache: Path, unfreeze: str | int) -> None:
    start = build_embedder("convnet", channels=3, seed=0).backbone.state_dict()
    views = None if unfreeze == "all" else 2
    settings = SETTINGS | {"views": views, "unfreeze": unfreeze}
    run = nofuss.train(pictures(), out=tmp_path / "run", **settings)
    found = weights(run)
    moved = {
        int(name.split(".")[1]) // 4  # four layers a stage
        for name, before in start.items()
        if not torch.equal(found[f"backbone.{name}"], before)
    }
    count = 4 if unfreeze == "all" else int(unfreeze)
    assert moved == set(range(4 - count, 4))
    assert len(list(cache.glob("activations-*.records"))) == (unfreeze != "all")


@pytest.mark.slow
def test_what_held_out_classes_lose_is_not_kept(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On so few pictures training does harm: the run ends with the network from before it."""
    caplog.set_level("INFO", "nofuss")
    start = build_embedder("convnet", channels=3, seed=0).backbone.state_dict()
    settings = SETTINGS | {"val_fraction": 0.25}
    run = nofuss.train(pictures(), out=tmp_path / "run", unfreeze="1", **settings)
    found = weights(run)
    assert json.loads((run / "scores.json").read_text())["method"] == "before training"
    assert "as before training, by which held-out classes lost" in (run / "README.md").read_text()
    assert all(torch.equal(found[f"backbone.{name}"], before) for name, before in start.items())
    assert "the run keeps the network from before training" in caplog.text
    assert len(list(cache.glob("activations-*.records"))) == 2  # of training and held-out items


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nofuss.train(pictures(), out=tmp_path / "first", unfreeze="2", **SETTINGS)
    written = {file: file.stat().st_mtime_ns for file in cache.glob("activations-*.records")}
    again = nofuss.train(pictures(), out=tmp_path / "again", unfreeze="2", **SETTINGS)
    assert written.keys() == set(cache.glob("activations-*.records"))
    (tmp_path / "file").write_text("no folder can be made here")
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "file" / "cache"))
    without = nofuss.train(pictures(), out=tmp_path / "without", unfreeze="2", **SETTINGS)
    for other in (again, without):
        assert all(torch.equal(weights(other)[k], t) for k, t in weights(first).items())


@pytest.mark.parametrize("train_size", [None, 20])
def test_batches_are_those_of_the_pictures(train_size: int | None) -> None:
    """The plain way beside it: load the same batch, run the first stages."""
    x, y = pictures()
    data = from_arrays({"images": x, "labels": y}, name="x")
    preprocessing = Preprocessing(
        size=28, resize=32, mean=(127,) * 3, std=(64,) * 3, zoom=0.5, train_size=train_size
    )
    embedder = build_embedder("convnet", channels=3, dim=4, weights=None).eval()
    embedder.backbone.preprocessing = preprocessing
    kept = activations_of(embedder, 2, data, views=2, augmented=True, seed=5)
    feed = Batches(data, preprocessing, settings_of(batch_size=16, seed=5), kept)
    assert len(feed) == 3
    trunk = Trunk(embedder.backbone, 2)
    for epoch in (0, 1, 2):
        for batch in feed(epoch, 1):
            rows = batch.indices.numpy()
            [views] = batches(data, preprocessing, [rows], train=True, seed=5, epoch=epoch % 2)
            assert views.inputs.shape[-2:] == (train_size or 28,) * 2
            with torch.no_grad():
                expected = trunk(views.inputs)
            torch.testing.assert_close(batch.inputs, expected, rtol=2e-3, atol=2e-3)
            assert torch.equal(batch.labels, torch.from_numpy(y[rows]))


@pytest.mark.parametrize("mirror", [False, True])
def test_features_from_centre_activations_are_the_network_s(mirror: bool) -> None:
    x, y = pictures()
    data = from_arrays({"images": x, "labels": y}, name="x")
    preprocessing = Preprocessing(size=28, resize=32, mean=(127,) * 3, std=(64,) * 3)
    embedder = build_embedder("convnet", channels=3, weights=None, mirror=mirror).eval()
    embedder.backbone.preprocessing = preprocessing
    views = 2 if mirror else 1
    kept = activations_of(embedder, 2, data, views=views, augmented=False)
    [batch] = batches(data, preprocessing, [np.arange(60)], train=False)
    with torch.no_grad():
        expected = embedder.backbone(batch.inputs)
    torch.testing.assert_close(top_features(embedder, 2, kept), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unfreeze": "9"}, "4 stages"),
        ({"lora": 4}, "attention"),
        ({"size": 28, "train_size": 32}, "train_size is 32, .* 28"),
        ({"preset": "frozen", "val_fraction": None, "train_size": 20}, "trainable backbone"),
        ({"backbone": "efficientnet-lite0", "size": 16}, "16 pixels"),
    ],
)
def test_mistakes_leave_no_run(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nofuss.train(pictures(), out=tmp_path / "run", **SETTINGS | settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_last_head_is_solved_on_what_the_trained_network_gives(tmp_path: Path) -> None:
    images, labels = pictures()
    settings = SETTINGS | {"dim": 6, "start": "whitened", "test_fraction": 0.0, "mirror": False}
    run = nofuss.train((images, labels), out=tmp_path / "run", unfreeze="1", **settings)
    encoder = nofuss.load(run)
    assert encoder.dim == 6
    state = load_file(next((run / "checkpoints").glob("step-*")))
    (trained,) = [tensor for name, tensor in state.items() if name.endswith("head.weight")]
    assert trained.shape == (6, 256)
    assert not torch.allclose(trained, encoder.embedder.head.weight, atol=1e-3)
    collection = from_arrays({"images": images, "labels": labels}, name="arrays")
    features = features_of(encoder.embedder.backbone, collection).values
    chosen = json.loads((run / "choice.json").read_text())
    decided = after_training(read_as(Choice, chosen["choice"]))
    assert decided.recipe.shrinkage >= TRAINED_SHRINKAGE
    asked = settings_of(dim=6)
    expected = fit_head(features, torch.from_numpy(labels), asked, decided=decided).embed(features)
    found = normalize(encoder.embedder.head(encoder.embedder.to_head(features)).detach())
    assert torch.allclose(found, expected, atol=1e-2)
    proxies = load_proxies(run, encoder.digest, encoder.dim).proxies
    means = torch.stack([found[labels == c].mean(0) for c in range(labels.max() + 1)])
    assert torch.allclose(torch.from_numpy(proxies), normalize(means), atol=1e-2)


@pytest.mark.slow
def test_training_on_smaller_crops_is_searched_at_full_size(tmp_path: Path) -> None:
    settings = SETTINGS | {"unfreeze": "2"}
    found = {}
    for size in (None, 20):
        run = nofuss.train(pictures(), out=tmp_path / f"{size}", train_size=size, **settings)
        [look] = nofuss.load(run).preprocessing
        assert look.train_size == size
        found[size] = look.size, weights(run)
    assert found[None][0] == found[20][0]
    moved = [k for k, t in found[None][1].items() if not torch.equal(t, found[20][1][k])]
    assert any(name.startswith("backbone.") for name in moved)


def test_after_training_the_closed_form_shrinks_more() -> None:
    choice = Choice(CLOSED, Recipe(shrinkage=0.3, emphasis=1.0), 8)
    assert after_training(choice).recipe == Recipe(shrinkage=TRAINED_SHRINKAGE, emphasis=1.0)
    more = Choice(CLOSED, Recipe(root=False, shrinkage=0.97), 8)
    assert after_training(more) == more


@pytest.mark.slow
def test_several_proxies_follow_the_items_they_stood_for(tmp_path: Path) -> None:
    settings = SETTINGS | {"start": "whitened", "test_fraction": 0.0}
    settings |= {"loss": "soft-triple", "proxies_per_class": 2.0}
    run = nofuss.train(pictures(), out=tmp_path / "run", unfreeze="1", **settings)
    proxies = torch.from_numpy(load_proxies(run, nofuss.load(run).digest, 16).proxies)
    assert proxies.shape == (24, 16)
    items = nofuss.Index.load(run / "index").vectors
    assert (proxies @ items.T).amax(1).min() < 1 - 1e-4, "means of items, not items"


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x.mean((2, 3))), self.second(x.amax((2, 3)))], 1)


@pytest.mark.slow
def test_layers_may_share_their_weights(tmp_path: Path) -> None:
    run = nofuss.train(
        pictures(), out=tmp_path / "run", backbone=Tied(), preset="finetune", epochs=1, dim=4
    )
    found = weights(run)
    first, second = (found[f"backbone.network.{name}.weight"] for name in ("first", "second"))
    assert torch.equal(first, second)
    assert nofuss.load(run, backbone=Tied()).embed(list(pictures()[0][:2])).shape == (2, 4)


# What is prepared


def test_a_head_from_a_pca_is_trained_on_vectors() -> None:
    """Fixed features: the head alone, and the mean of features of both signs is taken away."""
    x = torch.randn(60, 7, generator=torch.Generator().manual_seed(0)) + 0.1
    data = from_arrays({"vectors": x.numpy(), "labels": np.arange(60) % 6}, name="x")
    embedder = build_embedder("identity", dim=4, channels=7)
    training, feed = prepare(settings_of(start="pca", dim=4, epochs=2), embedder, data, x)
    assert training.model is embedder.head
    assert [g["name"] for g in training.optimizer.param_groups] == ["head", "proxies"]
    torch.testing.assert_close(embedder.head(x).mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    e = normalize(embedder.head(x).detach())
    means = torch.stack([e[labels_of(data) == c].mean(0) for c in range(6)])
    proxies: Any = training.criterion.proxies
    torch.testing.assert_close(proxies.detach(), normalize(means), rtol=0, atol=1e-5)
    run_loop(training, feed)
    assert training.history[-1]["loss"] < training.history[0]["loss"]


def test_labels_are_numbered_without_gaps() -> None:
    x = np.zeros((4, 2), dtype=np.float32)
    data = from_arrays({"vectors": x, "labels": np.array([0, 1, 2, 3])}, name="x")
    assert labels_of(data.subset(np.array([3, 1]))).tolist() == [1, 0]
