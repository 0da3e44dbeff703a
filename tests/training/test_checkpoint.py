"""Checkpoints: what is written comes back bit for bit, and damage is found, said and survived."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nofuss.errors import RunError
from nofuss.files import TEMPORARY
from nofuss.training import checkpoint
from nofuss.training.callbacks import Control
from nofuss.training.checkpoint import (
    load_checkpoint,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
    save_checkpoint,
)
from nofuss.training.loop import run_loop


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for step in (4, 8):
        save_checkpoint(tmp_path, step, {"x": torch.full((3,), float(step))}, {"epoch": step})
    return tmp_path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())


def newest(folder: Path) -> Path:
    return folder / "step-8.safetensors"


def test_every_tensor_comes_back(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 4),
        "double": torch.randn(2, dtype=torch.float64),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 4).T,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "odd numbers": torch.tensor([float("inf"), -0.0, 1e-45]),
    }
    state = {"epoch": 2, "loss_sum": 0.1 + 0.2, "history": [{"epoch": 1, "loss": 1 / 3}]}
    save_checkpoint(tmp_path, 12, tensors, state)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 12
    assert same(found.tensors, tensors)
    assert {k: found.state[k] for k in state} == state


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_optimizer_goes_on_as_if_never_saved(
    name: str, tmp_path: Path, training: Callable[..., Any], feed: Any
) -> None:
    """State equal after loading, in the parameters' memory layout, and equal after more steps."""
    kept = training(name, schedule="constant")
    run_loop(kept, feed, Control(checkpoints=tmp_path))
    back = training(name, schedule="constant")
    assert back.resume(tmp_path)
    assert same(optimizer_tensors(back.optimizer), optimizer_tensors(kept.optimizer))
    weight = next(back.model.parameters())
    state = back.optimizer.state[weight]
    assert weight.stride() != weight.contiguous().stride()
    assert all(v.stride() == weight.stride() for v in state.values() if v.shape == weight.shape)
    for t in (kept, back):
        t.epochs = 5
        run_loop(t, feed)
    assert same(module_tensors("m", back.model), module_tensors("m", kept.model))
    assert same(optimizer_tensors(back.optimizer), optimizer_tensors(kept.optimizer))


def test_keeps_two(tmp_path: Path) -> None:
    for step in (1, 2, 10, 30):
        save_checkpoint(tmp_path, step, {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-10.safetensors",
        "step-30.safetensors",
    ]


def test_saving_the_same_step_again_replaces_it(two: Path) -> None:
    save_checkpoint(two, 8, {"x": torch.zeros(1)}, {"epoch": 9})
    found = load_checkpoint(two)
    assert found is not None
    assert found.state["epoch"] == 9
    assert steps(two) == [4, 8]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_the_state(file: Path) -> None:
    """Another epoch, in a file that is as readable as before."""
    file.write_bytes(file.read_bytes().replace(b'epoch\\": 8', b'epoch\\": 9'))


@pytest.mark.parametrize("damage", [flip, flip_the_state, truncate, empty])
def test_a_damaged_newest_is_logged_and_the_one_before_used(
    two: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(newest(two))
    found = load_checkpoint(two)
    assert found is not None
    assert found.step == 4
    (line,) = caplog.messages
    assert "step-8" in line
    assert "\n" not in line


def test_none_whole_is_none(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (4, 8):
        flip(two / f"step-{step}.safetensors")
    assert load_checkpoint(two) is None
    assert len(caplog.messages) == 2


def test_damaged_ones_do_not_crowd_out_what_is_saved_after(two: Path) -> None:
    """After going back, the new checkpoints are the ones kept, not the damaged later ones."""
    for step in (4, 8):
        flip(two / f"step-{step}.safetensors")
    for step in (1, 2):
        save_checkpoint(two, step, {}, {})
    assert steps(two) == [1, 2]
    found = load_checkpoint(two)
    assert found is not None
    assert found.step == 2


def test_a_byte_anywhere_is_noticed(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = newest(two).read_bytes()
    for place in range(len(content)):
        newest(two).write_bytes(
            content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :]
        )
        caplog.clear()
        found = load_checkpoint(two)
        assert found is not None
        assert (found.step, len(caplog.messages)) == (4, 1), place


def test_half_written_files_are_ignored(two: Path) -> None:
    for stray in (
        f"{TEMPORARY}{'0' * 16}",
        "step-.safetensors",
        "step-x.safetensors",
    ):
        (two / stray).write_bytes(b"half")
    found = load_checkpoint(two)
    assert found is not None
    assert found.step == 8


def test_missing_folder_is_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none") is None


def test_another_format_is_refused(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of a later version, whole by its checksum."""
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 99)
        save_checkpoint(two, 8, {}, {})
    found = load_checkpoint(two)
    assert found is not None
    assert found.step == 4
    assert "format 99" in caplog.messages[0]


def test_tensors_of_another_model_are_refused(training: Callable[..., Any]) -> None:
    t = training()
    tensors = module_tensors("model", t.model)
    with pytest.raises(RunError, match="the model"):
        restore_module("model", torch.nn.Linear(2, 2), tensors)
    tensors.pop("model.0.weight")
    with pytest.raises(RunError, match="the model"):
        restore_module("model", t.model, tensors)


def test_optimizer_state_of_another_model_is_refused(training: Callable[..., Any]) -> None:
    t = training()
    with pytest.raises(RunError, match="the optimizer"):
        restore_optimizer(t.optimizer, {"optimizer.99.exp_avg": torch.zeros(3)})


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_optimizer_state_of_another_shape_is_refused(
    name: str, training: Callable[..., Any], feed: Any
) -> None:
    """A fused optimizer walks past the end of a moment that is shorter than its parameter."""
    t = training(name, schedule="constant")
    run_loop(t, feed)
    whole = optimizer_tensors(t.optimizer)
    moment = max((k for k in whole if whole[k].ndim), key=lambda k: whole[k].numel())
    for other in (whole[moment][:1], whole[moment].reshape(-1)):
        with pytest.raises(RunError, match="the optimizer"):
            restore_optimizer(t.optimizer, whole | {moment: other})
    assert same(optimizer_tensors(t.optimizer), whole)
