"""Half precision on the CPU's autocast, and copies to other devices.

A GPU is not needed: autocast and the checkpoints are the same code there. What only a
GPU has (streams, pinned memory) is not run here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nofuss
from nofuss.errors import RunError, UsageError
from nofuss.files import read_json, write_json
from nofuss.losses import ProxyNCA
from nofuss.model.backbones import check_precision
from nofuss.model.embedder import build_embedder, for_inference
from nofuss.model.saved import load_model, save_model
from tests.training.test_finetune import SETTINGS, pictures, weights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def backbone_of(precision: Any) -> Any:
    embedder = build_embedder("convnet", dim=8, channels=3, seed=0)
    embedder.backbone.precision = precision
    return embedder


def test_only_the_network_is_in_half_precision() -> None:
    """Activations are halves, channels last; features, embeddings and gradients are float32."""
    embedder, seen = backbone_of("bf16"), list[Tensor]()
    for layer in embedder.backbone.network:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, __, out: seen.append(out))
    x = torch.randn(4, 3, 32, 32)
    embeddings = embedder(x)
    assert {t.dtype for t in seen} == {torch.bfloat16}
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen)
    assert embeddings.dtype == torch.float32
    ProxyNCA(5, 8)(embeddings, torch.tensor([0, 1, 2, 3])).backward()
    assert {p.grad.dtype for p in embedder.parameters()} == {torch.float32}
    full = backbone_of("fp32")(x)
    assert not torch.equal(embeddings, full)
    torch.testing.assert_close(embeddings, full, atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_a_run_in_half_precision_resumes_with_the_same_bits(tmp_path: Path) -> None:
    moving = SETTINGS | {"unfreeze": "all", "views": None}
    settings = moving | {"precision": "bf16"}
    whole = nofuss.train(pictures(), out=tmp_path / "whole", **settings)
    steps = sorted((whole / "checkpoints").iterdir(), key=lambda p: int(p.stem[5:]))
    steps[-1].unlink()  # so that the one before is resumed
    (whole / "report.html").unlink()  # a finished run has nothing left to do
    ended = weights(whole)
    again = nofuss.train(pictures(), out=whole, resume=True)
    assert all(torch.equal(t, weights(again)[name]) for name, t in ended.items())
    full = nofuss.train(pictures(), out=tmp_path / "full", **moving)
    assert not all(torch.equal(t, ended[name]) for name, t in weights(full).items())
    with pytest.raises(RunError, match="precision"):
        nofuss.train(pictures(), out=whole, resume=True, precision="fp32")
    assert json.loads((whole / "model" / "model.json").read_text())["precision"] == "bf16"
    # On a CPU, search computes in float32, whatever the training computed in.
    assert nofuss.load(whole).embedder.backbone.precision == "fp32"


def test_features_of_different_precision_are_kept_apart() -> None:
    embedder = build_embedder("efficientnet-lite0", weights=None)
    keys = set()
    for precision in ("fp32", "bf16"):
        embedder.backbone.precision = precision
        keys.add(for_inference(embedder).backbone.key)
    assert len(keys - {None}) == 2


def test_a_model_knows_its_precision(tmp_path: Path) -> None:
    embedder = backbone_of("bf16")
    save_model(tmp_path / "model", embedder)
    assert load_model(tmp_path / "model")[0].backbone.precision == "bf16"
    file = tmp_path / "model" / "model.json"
    description = read_json(file)
    write_json(file, description | {"precision": "fp16"})
    with pytest.raises(RunError, match="precision is 'fp16'"):
        load_model(tmp_path / "model")


def test_a_device_without_autocast_is_refused() -> None:
    check_precision("fp32", torch.device("meta"))
    with pytest.raises(UsageError, match="device meta"):
        check_precision("bf16", torch.device("meta"))
