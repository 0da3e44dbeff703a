"""Half precision on the CPU's autocast, compiled networks, and copies to other devices.

A GPU is not needed: autocast, the scaler and the checkpoints are the same code there. What only a
GPU has (streams, pinned memory) is not run here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nofuss
from nofuss.config import TrainConfig
from nofuss.data.loader import Batch, on_device
from nofuss.errors import RunError, UsageError
from nofuss.losses import ProxyNCA
from nofuss.model.embedder import build_embedder
from nofuss.model.features import feature_store
from nofuss.model.precision import casting, check_precision
from nofuss.model.saved import load_model, save_model
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.loop import Interrupted, Training, run_loop
from nofuss.training.presets import resolve
from nofuss.training.step import NonFiniteLoss, train_step
from tests.training.small_training import Pictures, Recorder, make_training
from tests.training.test_finetune import SETTINGS, pictures, weights

CPU = torch.device("cpu")
HALVES = [("bf16", torch.bfloat16), ("fp16", torch.float16)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def backbone_of(precision: Any) -> Any:
    embedder = build_embedder("convnet", dim=8, channels=3, seed=0)
    embedder.backbone.precision = precision
    return embedder


@pytest.mark.parametrize(("precision", "dtype"), HALVES)
def test_only_the_network_is_in_half_precision(precision: str, dtype: torch.dtype) -> None:
    """Activations are halves, channels last; features, embeddings and gradients are float32."""
    embedder, seen = backbone_of(precision), list[Tensor]()
    for layer in embedder.backbone.network:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, __, out: seen.append(out))
    x = torch.randn(4, 3, 32, 32)
    embeddings = embedder(x)
    assert {t.dtype for t in seen} == {dtype}
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen)
    assert embeddings.dtype == torch.float32
    ProxyNCA(5, 8)(embeddings, torch.tensor([0, 1, 2, 3])).backward()
    assert {p.grad.dtype for p in embedder.parameters()} == {torch.float32}
    full = backbone_of("fp32")(x)
    assert not torch.equal(embeddings, full)
    torch.testing.assert_close(embeddings, full, atol=0.05, rtol=0.05)


def test_single_precision_is_untouched_by_autocast() -> None:
    with casting("fp32", CPU):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("precision", "unfreeze"), [("fp16", "2"), ("bf16", "all")])
def test_a_run_in_half_precision_resumes_with_the_same_bits(
    tmp_path: Path, precision: str, unfreeze: str
) -> None:
    moving = SETTINGS | {"unfreeze": unfreeze, "views": None if unfreeze == "all" else 2}
    settings = moving | {"precision": precision}
    whole = nofuss.train(pictures(), out=tmp_path / "whole", **settings)
    steps = sorted((whole / "checkpoints").iterdir(), key=lambda p: int(p.stem[5:]))
    newest = load_checkpoint(whole / "checkpoints", say=print)
    assert newest is not None
    assert ("scaler" in newest.state) == (precision == "fp16")
    steps[-1].unlink()  # so that the one before is resumed
    ended = weights(whole)
    again = nofuss.train(pictures(), out=whole, resume=True)
    assert all(torch.equal(t, weights(again)[name]) for name, t in ended.items())
    full = nofuss.train(pictures(), out=tmp_path / "full", **moving)
    assert not all(torch.equal(t, ended[name]) for name, t in weights(full).items())
    with pytest.raises(RunError, match="precision"):
        nofuss.train(pictures(), out=whole, resume=True, precision="fp32")
    assert json.loads((whole / "model" / "model.json").read_text())["precision"] == precision
    # On a CPU, search computes in float32, whatever the training computed in.
    assert nofuss.load(whole).embedder.backbone.precision == "fp32"


def overflowing(t: Training) -> Training:
    """A training whose scaled gradients overflow at first."""
    t.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    return t


def test_an_overflow_skips_the_update_and_lowers_the_factor() -> None:
    feed = Pictures()
    t = overflowing(make_training())
    before = [p.detach().clone() for p in t.model.parameters()]
    batch = next(iter(feed(0, 0)))
    assert t.scaler is not None
    loss, _ = train_step(t.model, t.criterion, t.optimizer, batch, t.scaler)
    assert np.isfinite(loss)
    assert t.scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, b) for a, b in zip(before, t.model.parameters(), strict=True))


def test_the_factor_is_resumed(tmp_path: Path) -> None:
    """Interrupted while the factor still falls, the run ends with the same bits and factor."""
    feed, whole = Pictures(), overflowing(make_training())
    run_loop(whole, feed, watch=Recorder())
    assert whole.scaler is not None
    count = iter(range(100))
    part = overflowing(make_training())
    with pytest.raises(Interrupted):
        run_loop(part, feed, watch=Recorder(), checkpoints=tmp_path, stop=lambda: next(count) >= 2)
    rest, found = overflowing(make_training()), load_checkpoint(tmp_path, say=print)
    assert found is not None
    rest.restore(found)
    run_loop(rest, feed, watch=Recorder())
    assert rest.scaler is not None
    assert rest.scaler.state_dict() == whole.scaler.state_dict()
    assert rest.scaler.get_scale() < 2.0**127
    pairs = zip(rest.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for damaged in (None, {}, found.state["scaler"] | {"scale": float("nan")}):
        found.state["scaler"] = damaged
        with pytest.raises(RunError, match="does not fit the scaler"):
            rest.restore(found)


def test_without_a_factor_left_an_overflow_is_an_error() -> None:
    t = make_training()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    batch = next(iter(Pictures()(0, 0)))
    next(iter(t.model.parameters())).register_hook(lambda g: g * torch.inf)
    with pytest.raises(NonFiniteLoss, match="its gradient is not finite"):
        train_step(t.model, t.criterion, t.optimizer, batch, scaler)


def test_features_of_different_precision_are_kept_apart() -> None:
    embedder = build_embedder("efficientnet-lite0", weights=None)
    files = []
    for precision in ("fp32", "bf16", "fp16"):
        embedder.backbone.precision = precision
        store = feature_store(embedder.backbone)
        assert store is not None
        files.append(store.file)
    assert len(set(files)) == 3


def test_a_model_without_a_precision_is_single(tmp_path: Path) -> None:
    """As models are that were saved before there was a choice; nonsense is refused."""
    embedder = backbone_of("bf16")
    save_model(tmp_path / "model", embedder)
    assert load_model(tmp_path / "model")[0].backbone.precision == "bf16"
    file = tmp_path / "model" / "model.json"
    description = json.loads(file.read_text())
    (tmp_path / "model" / "manifest.json").unlink()
    file.write_text(json.dumps({k: v for k, v in description.items() if k != "precision"}))
    assert load_model(tmp_path / "model")[0].backbone.precision == "fp32"
    file.write_text(json.dumps(description | {"precision": "int4"}))
    with pytest.raises(RunError, match="precision is 'int4'"):
        load_model(tmp_path / "model")


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Skipping serialization")  # the compiler's
def test_a_compiled_network_learns_the_same(tmp_path: Path) -> None:
    """To rounding; a resumed run has the same bits as one that was not interrupted."""
    settings = SETTINGS | {"unfreeze": "2", "epochs": 2}
    plain = weights(nofuss.train(pictures(), out=tmp_path / "plain", **settings))
    run = nofuss.train(pictures(), out=tmp_path / "run", compile=True, **settings)
    compiled = weights(run)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, atol=1e-3, rtol=1e-2)
    steps = sorted((run / "checkpoints").iterdir(), key=lambda p: int(p.stem[5:]))
    steps[-1].unlink()
    again = weights(nofuss.train(pictures(), out=run, resume=True))
    assert all(torch.equal(t, again[name]) for name, t in compiled.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16", "kind": "vectors"}, "--precision is for networks"),
        ({"compile": True, "kind": "vectors"}, "--compile needs a network that is trained"),
        ({"compile": True, "kind": "pictures"}, "--compile needs a network that is trained"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: Any, message: str) -> None:
    kind = settings.pop("kind")
    with pytest.raises(UsageError, match=message):
        resolve(TrainConfig(**settings), kind=kind, small=False)


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="there is no no-such-compiler; drop it"):
        resolve(TrainConfig(compile=True, preset="finetune"), kind="pictures", small=False)


def test_a_device_without_autocast_is_refused() -> None:
    check_precision("fp32", torch.device("meta"))
    with pytest.raises(UsageError, match="no autocast for device meta"):
        check_precision("bf16", torch.device("meta"))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_batches_are_copied_one_ahead(count: int) -> None:
    """On torch's meta device, which has shapes but no numbers."""
    asked = list[int]()

    def loaded() -> Any:
        for i in range(count):
            asked.append(i)
            yield Batch(torch.zeros(i + 1, 3), None, torch.arange(i + 1))

    seen = list[int]()
    for i, batch in enumerate(on_device(loaded(), torch.device("meta"))):
        assert batch.inputs.device.type == "meta"
        assert batch.inputs.shape == (i + 1, 3)
        assert asked[-1] == min(i + 1, count - 1)
        seen.append(len(batch.indices))
    assert seen == list(range(1, count + 1))
    assert [b.inputs.device.type for b in on_device(loaded(), CPU)] == ["cpu"] * count
