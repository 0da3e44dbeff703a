"""A second device: torch's lazy one, which computes here but takes no tensor that is elsewhere.

There is no GPU to try; whatever would be on the wrong side of one is on the wrong side of this.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import nofuss
from nofuss.cli import main
from nofuss.config import Options
from nofuss.distributed.device import choose_device
from nofuss.errors import UsageError
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import model_files, save_model
from nofuss.training.train import run_training
from tests.losses.test_every_loss import EVERY


@pytest.fixture(scope="module")
def lazy() -> Iterator[torch.device]:
    """The device, ready; it puts work off, and after each step of an optimizer does it."""
    backend = pytest.importorskip("torch._lazy.ts_backend")
    backend.init()
    step = register_optimizer_step_post_hook(lambda *_: torch._lazy.mark_step())
    yield choose_device("lazy")
    step.remove()


def test_it_takes_nothing_from_elsewhere(lazy: torch.device) -> None:
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        torch.zeros(2, device=lazy) + torch.zeros(2)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("name", EVERY)
def test_losses_and_gradients_are_those_of_the_cpu(
    lazy: torch.device, name: str, fused: bool | None
) -> None:
    def found(device: torch.device) -> list[Tensor]:
        criterion = EVERY[name]().to(device)
        if getattr(criterion, "fused", False) is not False:
            criterion.fused = fused
        elif fused:
            pytest.skip("it has one form")
        return _loss_and_gradients(criterion, device)

    if name == "soft-triple":
        pytest.skip("this device takes 0.01 times whole numbers for doubles")

    for got, wanted in zip(found(lazy), found(torch.device("cpu")), strict=True):
        assert got.device.type == "lazy"
        torch.testing.assert_close(got.cpu(), wanted)


def _loss_and_gradients(criterion: nn.Module, device: torch.device) -> list[Tensor]:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.tensor([0, 1, 2, 0, 1, 3, 2, 0, 1, 2, 3, 0])  # brought over by the loss
    loss = criterion(x.requires_grad_(), labels)
    loss.backward()
    return [loss, x.grad, *(p.grad for p in criterion.parameters())]


def _vectors(folder: Path) -> Path:
    random, labels = np.random.default_rng(0), np.repeat(np.arange(24), 6)
    vectors = random.normal(size=(24, 12))[labels] + random.normal(size=(len(labels), 12))
    np.savez(folder / "vectors.npz", vectors=vectors.astype(np.float32), labels=labels)
    return folder / "vectors.npz"


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["static", "dynamic"])
def test_a_run_there_is_a_run_here(lazy: torch.device, tmp_path: Path, assignment: str) -> None:
    """The same scores and weights; a checkpoint from there is resumed here."""
    asked = Options(
        data=_vectors(tmp_path),
        dim=4,
        epochs=2,
        batch_size=36,
        assignment=assignment,
        optimizer="rmsprop",  # torch has no fused Adam for this device
    )
    here = run_training(replace(asked, out=tmp_path / "here", device="cpu"))
    there = run_training(replace(asked, out=tmp_path / "there", device="lazy"))
    _assert_alike(there, here)
    assert json.loads((there / "environment.json").read_text())["device"] == "lazy"
    (there / "checkpoints" / f"step-{_last_step(there)}.safetensors").unlink()
    (there / "report.html").unlink()  # a finished run has nothing left to do
    _assert_alike(run_training(Options(out=there, resume=True, device="cpu")), here)


def test_pictures_are_embedded_there(lazy: torch.device, tmp_path: Path) -> None:
    embedder = build_embedder("convnet", dim=4, channels=1)
    assert embedder.backbone.preprocessing is not None
    sides = replace(embedder.backbone.preprocessing, size=16, resize=16)
    embedder.backbone.preprocessing = sides
    save_model(tmp_path, embedder)
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16)).astype(np.uint8)
    found = [nofuss.load(tmp_path, device=name).embed(images) for name in ("lazy", "cpu")]
    assert found[0].device.type == "cpu"
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def _last_step(run: Path) -> int:
    return max(int(p.stem[5:]) for p in (run / "checkpoints").glob("step-*"))


def _assert_alike(run: Path, other: Path) -> None:
    found, wanted = (load_file(model_files(r / "model")[1]) for r in (run, other))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    scores = [json.loads((r / "scores.json").read_text()) for r in (run, other)]
    assert scores[0]["recall@1"] == pytest.approx(scores[1]["recall@1"], abs=0.03)


@pytest.mark.parametrize("name", ["warp", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(UsageError, match=f"can't use device {name}: "):
        choose_device(name)
    command = ["train", str(_vectors(tmp_path)), "--out", str(tmp_path / "run"), "--device", name]
    assert main(command) == 2
    assert f"can't use device {name}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
