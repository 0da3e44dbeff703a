"""`nofuss.train`: paths, arrays, datasets and modules of one's own, from Python."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import nofuss
from nofuss.cli import main
from nofuss.config import Options, Preprocessing
from nofuss.errors import DataError, UsageError
from nofuss.model.saved import model_files
from nofuss.training.callbacks import Event

SMALL = Preprocessing(size=24, resize=24, flip=False)


def vectors(classes: int = 8, each: int = 12) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    centres = random.normal(size=(classes, 16)).astype(np.float32)
    labels = np.repeat(np.arange(classes), each)
    return centres[labels] + 0.3 * random.normal(size=(len(labels), 16)).astype(np.float32), labels


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """A bright square at a place of its class's own."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 6)
    found = random.integers(0, 60, (len(labels), 24, 24, 3), dtype=np.uint8)
    for picture, label in zip(found, labels, strict=True):
        y, x = 3 * (label // 4), 5 * (label % 4)
        picture[y : y + 6, x : x + 6] = 250
    return found, labels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu().amax((2, 3))


class Pairs(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        found, self.targets = pictures()
        self.inputs = torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index])


def test_help_names_every_option_as_python_writes_types() -> None:
    found = inspect.signature(nofuss.train).parameters
    assert found.keys() >= {field.name for field in fields(Options)} | {"callback"}
    assert found["views"].annotation == int | None
    assert "Parameter" not in str(inspect.signature(nofuss.train))


@pytest.mark.slow
def test_a_path_gives_what_the_command_gives(tmp_path: Path) -> None:
    x, y = vectors()
    np.savez(tmp_path / "x.npz", vectors=x, labels=y)
    nofuss.train(tmp_path / "x.npz", out=str(tmp_path / "a"), seed=3)

    assert (
        main(["train", f"{tmp_path / 'x.npz'}", "--out", f"{tmp_path / 'b'}", "--seed", "3"]) == 0
    )
    one, two = (model_files(tmp_path / each / "model")[1].read_bytes() for each in "ab")
    assert one == two


@pytest.mark.slow
def test_a_dataset_of_tensors(tmp_path: Path) -> None:
    run = nofuss.train(Pairs(), preset="small", epochs=1, dim=8, size=24, out=tmp_path / "run")
    assert nofuss.load(run).dim == 8


@pytest.mark.slow
def test_mistakes_are_told_in_python_s_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^batch_size is 0; expected") as caught:
        nofuss.train(vectors(), batch_size=0, out=tmp_path / "a")
    assert "--" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^head_lr is -1"):
        nofuss.ProxyEmbedding(head_lr=-1).fit(*vectors())
    with pytest.raises(TypeError, match="epoch"):
        nofuss.train(vectors(), epoch=3, out=tmp_path / "b")
    with pytest.raises(UsageError, match=r"expected \(1, F\)"):
        nofuss.train(pictures(), backbone=nn.Conv2d(3, 4, 3), out=tmp_path / "c")
    with pytest.raises(UsageError, match="preprocessing"):
        nofuss.train(pictures(), preprocessing=SMALL, out=tmp_path / "d")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_module_is_left_with_the_modes_and_the_frozen_layers_it_came_with(tmp_path: Path) -> None:
    """And the run is loaded with another of its kind."""
    net, other = (nn.Sequential(Net(), nn.Linear(12, 10)) for _ in range(2))
    net[0].requires_grad_(False)
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    settings = {"preprocessing": SMALL, "epochs": 2}
    for preset, more in (("frozen", {}), ("finetune", {"val_fraction": 0.0, "warmup": 0})):
        out = tmp_path / preset
        nofuss.train(pictures(), backbone=net, preset=preset, out=out, **settings, **more)
        changed = {k for k, value in net.state_dict().items() if not torch.equal(value, before[k])}
        assert changed == ({"1.weight", "1.bias"} if preset == "finetune" else set())
        assert [part.training for part in net] == [True, False]
        assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
        encoder = nofuss.load(out, backbone=other)
        assert encoder.embed(list(pictures()[0])).shape[0] == 48
        found = encoder.embedder.backbone.network.state_dict()
        assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
        with pytest.raises(UsageError, match="backbone=MODULE"):
            nofuss.load(out)


@pytest.mark.slow
def test_settings_have_the_types_of_the_run_s_description(tmp_path: Path) -> None:
    x, y = vectors()
    run = nofuss.train(
        (x, y), dim=np.int64(4), device=torch.device("cpu"), epochs=0, out=tmp_path / "run"
    )
    assert json.loads((run / "config.json").read_text())["dim"] == 4
    wrong = [("epochs", "3"), ("epochs", 2.0), ("epochs", True), ("weights", {}), ("scale", "much")]
    for name, value in [*wrong, ("backbone", Net)]:
        with pytest.raises(UsageError, match=f"^{name} is "):
            nofuss.train((x, y), **{name: value}, out=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


class Folder:
    """A path that is neither a str nor a pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.slow
def test_any_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nofuss.train(vectors(), epochs=0, out=Folder(tmp_path / "run")) == tmp_path / "run"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nofuss.load("~/run").dim == 16


@pytest.mark.slow
def test_data_in_whatever_form_they_come(tmp_path: Path) -> None:
    x, y = vectors()
    words = np.array([f"class {label}" for label in y], dtype=object)  # as pandas has them
    for i, data in enumerate(([x, y], (torch.from_numpy(x).requires_grad_(), y), (x, words))):
        run = nofuss.train(data, epochs=0, out=tmp_path / str(i))
        assert json.loads((run / "scores.json").read_text())["recall@1"] > 0.9
        assert nofuss.recall_at_k(nofuss.load(run).embed(x), y)[1] > 0.9
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for wrong in ({}.values(), x, (x, y, y), {"X": x, "y": y}, tensors):
        with pytest.raises(DataError, match=r"data is a|dict_values|TensorDataset"):
            nofuss.train(wrong, out=tmp_path / "wrong")


@pytest.mark.slow
def test_pictures_in_tensors_of_bytes_are_those_in_arrays(tmp_path: Path) -> None:
    found, labels = pictures()
    tensors = torch.from_numpy(found).permute(0, 3, 1, 2)
    data = [(tensors[i], int(labels[i])) for i in range(len(labels))]

    class Bytes(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return data[index]

    settings = {"preset": "small", "epochs": 1, "dim": 8, "size": 24, "seed": 1}
    one = nofuss.train(Bytes(), out=tmp_path / "tensors", **settings)
    two = nofuss.train((found, labels), out=tmp_path / "arrays", **settings)
    weights = [model_files(run / "model")[1].read_bytes() for run in (one, two)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_what_came_from_python_is_resumed_from_python(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nofuss")

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        nofuss.train(vectors(), epochs=2, start="pca", callback=stop, out=run)
    again = f"nofuss.train(DATA, out='{run}', resume=True)"
    assert f"stopped; resume with: {again}" in caplog.messages
    assert main(["train", "--out", str(run), "--resume"]) == 2
    assert f"were given from Python; give them again: {again}" in capfd.readouterr().err
    nofuss.train(vectors(), out=run, resume=True)


@pytest.mark.slow
def test_equal_items_have_nothing_to_learn_and_break_nothing(tmp_path: Path) -> None:
    """What rounding leaves of them around their mean is no direction."""
    row = np.random.default_rng(0).normal(size=16).astype(np.float32)
    run = nofuss.train((np.tile(row, (60, 1)), np.arange(60) // 6), out=tmp_path / "run")
    assert (run / "report.html").is_file()
    assert nofuss.load(run).embed(row[None]).isfinite().all()
