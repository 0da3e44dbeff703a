"""Columns of a CSV, from the table to the search: through the command line's own door."""

import csv
import json
from pathlib import Path

import pytest

from nofuss.cli import main
from nofuss.data.columns import read_column
from nofuss.data.open import open_data
from tests.tiny_run import untrained_pictures, write_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("columns")
    return untrained_pictures(write_pictures(home / "data"), home / "run")


def write_table(run: Path, *, price: str = "{}.5") -> Path:
    """Every picture with a price, a shop, a day, and nothing in one column."""
    data = run.parent / "data"
    with (data / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "Price", "shop", "since", "empty"])
        for i, picture in enumerate(sorted(data.rglob("*.png"))):
            row = [picture.relative_to(data), picture.parent.name, price.format(i) if i % 4 else ""]
            table.writerow([*row, ("north", "south")[i % 2], f"2024-05-{i % 28 + 1:02}", ""])
    return data / "list.csv"


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-2.5", "", "1e3"], "number", [1.0, -2.5, None, 1000.0]),
        (["007", "1"], "text", ["007", "1"]),  # a code
        (["12345678901234567890"], "text", ["12345678901234567890"]),  # a float would lose digits
        (["true", " FALSE "], "bool", [True, False]),
        (["true", "1"], "text", ["true", "1"]),
        (
            ["2024-05-31", "2024-05-31 18:00"],
            "date",
            ["2024-05-31T00:00:00", "2024-05-31T18:00:00"],
        ),
        (["2024-05-32"], "text", ["2024-05-32"]),
        (["nan", "inf"], "text", ["nan", "inf"]),
        (["1,5"], "text", ["1,5"]),
        (["e5", ".", "+"], "text", ["e5", ".", "+"]),
        (["a\0\udcff"], "text", ["a\\x00\\udcff"]),
    ],
)
def test_the_type_of_a_column_is_that_of_all_its_cells(
    cells: list[str], kind: str, values: list[object]
) -> None:
    column = read_column(cells)
    assert column is not None
    assert (column.type, list(column.values)) == (kind, values)


def test_a_table_keeps_its_further_columns(run: Path) -> None:
    data = open_data(write_table(run))
    assert {name: column.type for name, column in data.columns.items()} == {
        "price": "number",
        "shop": "text",
        "since": "date",
    }
    part = data.subset([3, 1])
    assert list(part.columns["price"].values) == [3.5, 1.5]
    assert data.fingerprint() == open_data(write_table(run, price="{}")).fingerprint()


@pytest.mark.slow
def test_search_filters_and_shows_columns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_table(run)
    picture = str(run.parent / "data" / "plain" / "again.png")
    assert main(["index", str(run), str(table)]) == 0
    capsys.readouterr()
    where = "price<20 and shop=='north' and since>='2024-05-05'"
    assert main(["search", str(run), picture, "--where", where, "--json"]) == 0
    [query] = json.loads(capsys.readouterr().out)["queries"]
    assert query["neighbours"]
    for neighbour in query["neighbours"]:
        columns = neighbour["columns"]
        assert columns["price"] < 20
        assert columns["shop"] == "north"
        assert columns["since"] >= "2024-05-05"
    assert main(["search", str(run), picture, "--where", "price==6.5", "-k", "1"]) == 0
    assert "price: 6.5  shop: north  since: 2024-05-07" in capsys.readouterr().out
    assert main(["search", str(run), picture, "--where", "prize<6"]) == 2
    assert "--where: no column prize at character 1" in capsys.readouterr().err
    assert main(["search", str(run), picture, "--where", "price<0"]) == 0
