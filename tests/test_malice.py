"""What a stranger may put into a run, the cache or weights: one clear line, in little time."""

import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nofuss.data.columns import Column
from nofuss.data.corrections import corrected
from nofuss.data.open import open_data
from nofuss.errors import DataError, RunError, UsageError
from nofuss.model.backbones import fill, read_weights
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.search import Index
from nofuss.search.engines.url import read_url
from nofuss.search.lessons import MAP, Step
from tests.tiny_run import draw
from torture.forgeries import index_items

# Lessons


def step(folder: Path, matrix: torch.Tensor) -> Step:
    save_model(folder, build_embedder("identity", dim=3, channels=5))
    save_file({"map": matrix}, folder / MAP)
    return Step(folder, 1, "digest")


def test_a_map_of_embeddings(tmp_path: Path) -> None:
    assert step(tmp_path, 2 * torch.eye(3).double()).matrix.shape == (3, 3)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(3, 3).double(),
        torch.eye(4).double(),
        torch.eye(3),
        torch.zeros(0, 0).double(),
        torch.eye(3).double() * torch.nan,
        torch.tensor([1.0, 1.0, 1e-12]).double().diag(),
    ],
    ids=["zero", "another width", "single precision", "empty", "NaN", "nearly singular"],
)
def test_what_is_no_map_of_embeddings(matrix: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a map of embeddings"):
        _ = step(tmp_path, matrix).matrix


# Other files of a run


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("nan"), float("inf"), True],
    ids=["large", "small", "NaN", "infinite", "bool"],
)
def test_numbers_in_columns_that_no_float_holds(value: Any, tmp_path: Path) -> None:
    columns = {"price": Column("number", [1.0, 2.0])}
    index = Index.build(torch.eye(2), names=["a", "b"], columns=columns)
    index.save(tmp_path / "index")
    index_items(lambda i: i | {"columns": {"price": ["number", [value, 1]]}})(tmp_path, tmp_path)
    with pytest.raises(RunError, match=r"holds a value that is not number|is too large"):
        Index.load(tmp_path / "index")


def test_thousands_of_misspelled_classes_take_no_time(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / "data" / f"class {'long ' * 20}{number}").mkdir(parents=True)
        draw(1, 1).save(tmp_path / "data" / f"class {'long ' * 20}{number}" / "1.png")
    rows = [f"x,y,clas {'long ' * 20}{number}" for number in range(5_000)]
    (tmp_path / "corrections.csv").write_text("\n".join(["item,label,corrected", *rows]))
    data, began = open_data(tmp_path / "data"), time.process_time()
    with pytest.raises(DataError, match="did you mean"):
        corrected(data, tmp_path / "corrections.csv")
    assert time.process_time() - began < 5


# Weights and the cache


def test_a_compressed_file_of_weights(tmp_path: Path) -> None:
    """Two gigabytes of zeros in two megabytes would be unpacked before their shape is known."""
    torch.save({"w": torch.zeros(100_000)}, tmp_path / "w.pth")
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as stored,
        zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    assert read_weights(tmp_path / "w.pth").keys() == {"w"}
    with pytest.raises(RunError, match="is compressed"):
        read_weights(tmp_path / "small.pth")


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.eye(3, device="meta")],
    ids=["sparse", "without values"],
)
def test_weights_that_are_no_plain_tensors(tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"weight": tensor}, tmp_path / "w.pth")
    module = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(RunError, match="does not hold plain tensors"):
        fill(module, read_weights(tmp_path / "w.pth"), source=tmp_path / "w.pth")


def test_an_address_that_is_not_utf8_is_not_quoted() -> None:
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        read_url("postgresql://user@host/db?sslpassword=se\udcffcret", flag="--to")
    assert "cret" not in str(caught.value)
