"""What a stranger may put into an index, a lesson or an address: one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from nofuss.data.columns import Column
from nofuss.errors import RunError, UsageError
from nofuss.files import write_by_content, write_json
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import FORMAT, save_model
from nofuss.run.marks import FILE, read_marks
from nofuss.search import Index
from nofuss.search.engines.url import read_url
from nofuss.search.lessons import MAP, Step
from nofuss.search.searchable import Pictures
from tests.tiny_run import draw
from torture.forgeries import index_items


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


def test_weights_of_a_lesson_without_a_head(tmp_path: Path) -> None:
    weights = save({"head.weight": torch.ones(())})
    checksum = write_by_content(tmp_path, "weights", "safetensors", weights)
    write_json(tmp_path / "model.json", {"format": FORMAT, "weights": checksum})
    save_file({"map": torch.eye(3).double()}, tmp_path / MAP)
    with pytest.raises(RunError, match="not a map of embeddings"):
        _ = Step(tmp_path, 1, "digest").matrix


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


def test_only_arrays_are_opened_for_the_page(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    draw(0, 0).save(tmp_path / "a" / "x.png")
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 9, 9), np.uint8), labels=[0, 0, 1])
    gone = tmp_path / "gone.npz"
    pictures = Pictures([str(tmp_path), str(tmp_path / "x.npz"), str(gone)])
    assert pictures[f"{tmp_path}#0"] is None
    shard = Pictures(["d/x.tar"])  # its items are read from their place
    assert shard["d/x.tar#0"] == Path("d/x.tar#0")
    assert pictures[f"{gone}#0"] is None
    assert pictures[f"{tmp_path / 'x.npz'}#3"] is None
    assert not isinstance(pictures[f"{tmp_path / 'x.npz'}#2"], Path | None)
    for row in ("²", "9" * 5000):
        assert isinstance(pictures[f"{tmp_path / 'x.npz'}#{row}"], Path)


@pytest.mark.parametrize("same", ["1", "0", '"true"', "[]"])
def test_a_mark_is_true_false_or_null(same: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f'{{"query": "a", "item": "b", "same": {same}}}\n')
    assert read_marks(tmp_path).torn == 1


def test_an_address_that_is_not_utf8_is_not_quoted() -> None:
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        read_url("postgresql://user@host/db?sslpassword=se\udcffcret", flag="--to")
    assert "cret" not in str(caught.value)
