"""`nofuss.train`: paths, arrays, datasets and modules of one's own, from Python."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import nofuss
from nofuss.cli import main
from nofuss.config import Preprocessing
from nofuss.errors import RunError, UsageError

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


def test_vectors_with_labels(tmp_path: Path) -> None:
    x, y = vectors()
    run = nofuss.train((x, y), out=tmp_path / "run")
    assert run == tmp_path / "run"
    assert nofuss.recall_at_k(nofuss.load(run).embed(x), y)[1] > 0.9
    assert json.loads((run / "scores.json").read_text())["recall@1"] > 0.9


def test_a_path_gives_what_the_command_gives(tmp_path: Path) -> None:
    x, y = vectors()
    np.savez(tmp_path / "x.npz", vectors=x, labels=y)
    nofuss.train(tmp_path / "x.npz", out=str(tmp_path / "a"), seed=3)

    assert (
        main(["train", f"{tmp_path / 'x.npz'}", "--out", f"{tmp_path / 'b'}", "--seed", "3"]) == 0
    )
    one, two = ((tmp_path / each / "model/weights.safetensors").read_bytes() for each in "ab")
    assert one == two


@pytest.mark.parametrize("preset", ["frozen", "finetune"])
def test_a_module_of_one_s_own(tmp_path: Path, preset: str) -> None:
    net = Net()
    before = net.conv.weight.detach().clone()
    settings = {"epochs": 2, "holdout": 0.0} if preset == "finetune" else {"epochs": 2}
    run = nofuss.train(
        pictures(), backbone=net, preprocessing=SMALL, preset=preset, out=tmp_path, **settings
    )
    encoder = nofuss.load(run, backbone=Net())
    found = encoder.embed(list(pictures()[0]))
    assert found.shape[0] == 48
    moved = not torch.equal(encoder.embedder.backbone.network.conv.weight, before)
    assert moved == (preset == "finetune")
    with pytest.raises(RunError, match=r"nofuss\.load\(RUN, backbone=MODULE\)"):
        nofuss.load(run)


def test_a_dataset_of_tensors(tmp_path: Path) -> None:
    run = nofuss.train(Pairs(), preset="small", epochs=1, dim=8, size=24, out=tmp_path / "run")
    assert nofuss.load(run).dim == 8


def test_mistakes_are_told_in_python_s_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^batch is 0; expected") as caught:
        nofuss.train(vectors(), batch=0, out=tmp_path / "a")
    assert "--" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^head_rate is -1"):
        nofuss.ProxyEmbedding(head_rate=-1).fit(*vectors())
    with pytest.raises(TypeError, match="epoch"):
        nofuss.train(vectors(), epoch=3, out=tmp_path / "b")
    with pytest.raises(UsageError, match=r"expected \(2, F\)"):
        nofuss.train(pictures(), backbone=nn.Conv2d(3, 4, 3), out=tmp_path / "c")
    with pytest.raises(UsageError, match="preprocessing is for a backbone"):
        nofuss.train(pictures(), preprocessing=SMALL, out=tmp_path / "d")
    assert not any(tmp_path.iterdir())


def test_a_pca_fits_its_dimension_to_few_features(tmp_path: Path) -> None:
    """Without dim the default is 512, which sixteen features do not have."""
    x, y = vectors()
    run = nofuss.train((x, y), out=tmp_path / "run", start="pca", epochs=1)
    assert nofuss.load(run).dim == x.shape[1]
    lowered = nofuss.train((x, y), out=tmp_path / "more", start="pca", dim=600, epochs=1)
    assert nofuss.load(lowered).dim == x.shape[1]
