"""What a stranger may put into an index or an address: one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nofuss.data.columns import Column
from nofuss.errors import RunError, UsageError
from nofuss.search import Index
from nofuss.search.engines.url import read_url
from nofuss.search.page.state import Pictures
from tests.tiny_run import draw
from torture.runs import items


@pytest.mark.parametrize(
    "matrix",
    [torch.eye(4), torch.zeros(0, 0), torch.eye(3) * torch.nan, torch.zeros(3), torch.eye(3)[:2]],
    ids=["another width", "empty", "NaN", "a vector", "not square"],
)
def test_what_is_no_map_of_vectors(matrix: torch.Tensor, tmp_path: Path) -> None:
    index = Index.build(torch.eye(3), names=["a", "b", "c"])
    index.with_map(2 * torch.eye(3)).save(tmp_path)
    assert torch.equal(Index.load(tmp_path).vectors, torch.eye(3))
    index.with_map(matrix).save(tmp_path)
    with pytest.raises(RunError, match=r"can't be read .*map"):
        Index.load(tmp_path)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("nan"), float("inf"), True],
    ids=["large", "small", "NaN", "infinite", "bool"],
)
def test_numbers_in_columns_that_no_float_holds(value: Any, tmp_path: Path) -> None:
    columns = {"price": Column("number", [1.0, 2.0])}
    index = Index.build(torch.eye(2), names=["a", "b"], columns=columns)
    index.save(tmp_path / "index")
    items(lambda i: i | {"columns": {"price": ["number", [value, 1]]}})(tmp_path, tmp_path)
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


def test_an_address_that_is_not_utf8_is_not_quoted() -> None:
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        read_url("postgresql://user@host/db?sslpassword=se\udcffcret", flag="--to")
    assert "cret" not in str(caught.value)
