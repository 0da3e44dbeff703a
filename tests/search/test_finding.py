"""What `nofuss index` and `nofuss search` say: changes, what a filter leaves."""

import csv
import json
import os
from pathlib import Path

import pytest

from nofuss import Index
from nofuss.cli import main
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.ranking.rerank import Rerank
from nofuss.run.directory import create_run
from nofuss.search.update import open_items
from tests.asked import settings_of
from tests.tiny_run import draw, draw_folder

Capture = pytest.CaptureFixture[str]
NAMES = ("ant", "bee", "cat", "dog", "elk", "fox")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six classes of five pictures, each picture with a price."""
    return write_table(draw_folder(tmp_path / "data", NAMES, each=5))


def write_table(data: Path, *, cheaper: int = 0, relabelled: int = 0) -> Path:
    """The first `cheaper` pictures cost less, the last `relabelled` ones have another label."""
    pictures = sorted(data.rglob("*.png"))
    with (data / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "price"])
        for i, picture in enumerate(pictures):
            label = "ant" if i >= len(pictures) - relabelled else picture.parent.name
            rows.writerow([picture.relative_to(data), label, i - 0.5 * (i < cheaper)])
    return data / "list.csv"


@pytest.fixture
def run(tmp_path: Path, table: Path) -> Path:
    """A run on the table whose untrained network re-ranks and recognises unknown classes."""
    made = create_run(settings_of("pictures", 40, data=table, out=tmp_path / "run"), name="run")
    embedder = build_embedder("convnet", dim=8, channels=3, weights=None)
    rerank = Rerank({"recall@8": [0.0, -0.1, 0.1], "map@r": [0.1, 0.05, 0.2]})
    save_model(made.model, embedder, extra={"rerank": rerank.as_dict()})
    return made.path


def said(capsys: Capture, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    assert "--json" in words or not printed.err  # beside JSON, notes are on standard error
    return printed.out


def test_new_labels_and_columns_are_not_called_unchanged(
    run: Path, table: Path, capsys: Capture
) -> None:
    assert "30 new: 30 items" in said(capsys, "index", run)
    assert "30 unchanged: 30 items" in said(capsys, "index", run)
    os.utime(table.parent / "cat" / "0.png", (0, 0))  # touched: nothing that a user calls a change
    write_table(table.parent, cheaper=3, relabelled=2)
    assert "5 with new labels or columns, 25 unchanged: 30 items" in said(capsys, "index", run)
    assert Index.load(run / "index").labels.count("ant") == 7
    assert "30 unchanged: 30 items" in said(capsys, "index", run)


def test_a_filter_turns_off_what_is_about_the_whole_index(
    run: Path, table: Path, capsys: Capture
) -> None:
    said(capsys, "index", run)
    query = table.parent / "cat" / "0.png"
    content = json.loads(said(capsys, "search", run, query, "--json"))
    assert content["rerank"] is not None
    assert content["open_set"] is not None
    assert content["queries"][0]["sentence"]
    content = json.loads(said(capsys, "search", run, query, "--where", "price<9", "--json"))
    assert (content["rerank"], content["open_set"]) == (None, None)
    [answer] = content["queries"]
    assert (answer["match"], answer["sentence"]) == ("unknown", "")
    distances = [neighbour["distance"] for neighbour in answer["neighbours"]]
    assert distances == sorted(distances)


def test_a_filter_that_nothing_passes_says_so(run: Path, table: Path, capsys: Capture) -> None:
    said(capsys, "index", run)
    query = table.parent / "cat" / "0.png"
    printed = said(capsys, "search", run, query, "--where", "price<0")
    assert printed.splitlines() == [str(query), "  nothing passes the filter"]
    assert "nothing passes" not in said(capsys, "search", run, query, "--where", "price<9")


def test_pictures_without_a_label_are_no_class(run: Path, table: Path, capsys: Capture) -> None:
    data = table.parent
    table.unlink()
    assert open_items(data).describe().startswith("6 classes, 30 images, ")
    draw(0, 50).save(data / "loose.png")
    printed = said(capsys, "index", run, data)
    assert printed.startswith("6 classes, 31 images, ")
    assert "; 1 without a label\n" in printed
    index = Index.load(run / "index")
    assert {*index.labels} == {*NAMES, None}
    assert index.get([str(data / "loose.png")])[0].label is None


def test_an_option_of_training_is_suggested_for_training(
    run: Path, table: Path, capsys: Capture
) -> None:
    data = table.parent
    for name in NAMES:
        (data / "animals").mkdir(exist_ok=True)
        (data / name).rename(data / "animals" / name)
    table.unlink()
    printed = " ".join(said(capsys, "index", run, data).split())
    assert "folders in folders, 2 deep: the innermost are the classes; `nofuss train " in printed
    assert "6 classes" in printed
