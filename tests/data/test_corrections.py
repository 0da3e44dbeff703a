"""Corrected labels: applied to the items they name, and to nothing else."""

from pathlib import Path

import numpy as np
import pytest

from nofuss.cli import main
from nofuss.data.corrections import COLUMNS, Correction, corrected, read_corrections
from nofuss.data.open import open_data
from nofuss.errors import DataError
from nofuss.files import csv_text, digest
from nofuss.run.directory import Run
from nofuss.search.feedback import FILE, Mark, append
from nofuss.search.folder import FolderIndex
from nofuss.search.update import update_index
from tests.tiny_run import draw_folder

NAMES = ["red", "blue", "green", "sea/orange", "sea/purple", "sea/gray"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return draw_folder(tmp_path / "data", NAMES, each=4)


def labels_of(collection: object) -> dict[str, str]:
    labels, names = collection.labels, collection.class_names  # type: ignore[attr-defined]
    return {n: names[c] for n, c in zip(collection.names, labels, strict=True)}  # type: ignore[attr-defined]


def write_corrections(file: Path, rows: list[Correction]) -> None:
    """As somebody would write them, who copies names from a CSV of ours."""
    file.write_bytes(csv_text([COLUMNS, *rows]).encode("utf-8", "surrogateescape"))


def test_a_csv_is_read_whatever_the_names_are_made_of(tmp_path: Path) -> None:
    """Commas, quotes, lines, bytes that are not UTF-8, what a spreadsheet takes for a formula."""
    rows = [
        Correction('a,"b"\nc.png', "x;y", "z"),
        Correction("caf\udce9/1.png", "é", "★"),
        Correction("=1+1/a.png", '=HYPERLINK("http://x")', "-10"),
        Correction("@a", "'=b", "+c"),
    ]
    write_corrections(tmp_path / "file.csv", rows)
    assert read_corrections(tmp_path / "file.csv") == rows
    by_hand = "item,label,corrected\n=1+1/a.png,a,-10\n"  # as somebody types it
    (tmp_path / "file.csv").write_text(by_hand)
    assert read_corrections(tmp_path / "file.csv") == [Correction("=1+1/a.png", "a", "-10")]


def test_feedback_of_a_run_is_read_too(tmp_path: Path) -> None:
    """What is said last of an item counts; marks, rubbish and a cut last line do not."""
    said = [
        Correction("caf\udce9/\ud800.png", "a", "b"),
        Mark("x", "y", True),
        Correction("2.png", "a", "c"),
        Correction("3.png", "a", "c"),
        Correction("2.png", "a", "a"),
        Correction("3.png", "a", None),
    ]
    append(tmp_path, said)
    with (tmp_path / FILE).open("a") as file:
        file.write('[1]\n{"item": "4.png", "label": 7, "corrected": "b"}\n{"item": "5.png", "la')
    expected = [said[0], said[4]]
    assert read_corrections(tmp_path / FILE) == expected
    (tmp_path / FILE).rename(tmp_path / "corrected.csv")  # as a run keeps its copy
    assert read_corrections(tmp_path / "corrected.csv") == expected


def test_only_the_named_items_change(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nofuss")
    before = labels_of(open_data(data))
    rows = [
        Correction(str(data / "red" / "0.png"), "red", "blue"),
        Correction("sea/gray/1.png", "sea/gray", "sea/orange"),  # relative to the data
        Correction("green/2.png", "green", "green"),  # confirmed
    ]
    write_corrections(tmp_path / "file.csv", rows)
    after = labels_of(corrected(open_data(data), tmp_path / "file.csv"))
    assert {n for n in before if before[n] != after[n]} == {"red/0.png", "sea/gray/1.png"}
    assert (after["red/0.png"], after["sea/gray/1.png"]) == ("blue", "sea/orange")
    assert [message[:2] for message in caplog.messages] == ["2 "]


def test_what_does_not_fit_is_counted(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nofuss")
    rows = [
        Correction("gone.png", "red", "blue"),
        Correction("red/0.png", "green", "blue"),  # it was green once
        Correction("red/1.png", "green", "red"),  # and this one has been put right
    ]
    write_corrections(tmp_path / "file.csv", rows)
    whole = open_data(data)
    assert corrected(whole, tmp_path / "file.csv") is whole
    assert [message[:2] for message in caplog.messages] == ["0 ", "1 ", "1 "]


def test_an_item_without_a_label_gets_one(data: Path, tmp_path: Path) -> None:
    """Pictures beside the class folders, as `nofuss index` opens them."""
    for i in range(3):
        (data / "red" / f"{i}.png").rename(data / f"{i}.png")
    rows = [Correction(f"{i}.png", "", name) for i, name in enumerate(["blue", sorted(NAMES)[-1]])]
    write_corrections(tmp_path / "file.csv", rows)
    found = corrected(open_data(data, unlabelled=True), tmp_path / "file.csv")
    row_of = {name: row for row, name in enumerate(found.names)}
    labels = [found.labels[row_of[f"{i}.png"]] for i in range(3)]
    assert [found.class_names[label] for label in labels[:2]] == ["blue", sorted(NAMES)[-1]]
    assert labels[2] == -1


@pytest.mark.slow
def test_an_unknown_class_is_one_line(data: Path, tmp_path: Path) -> None:
    write_corrections(tmp_path / "file.csv", [Correction("red/0.png", "red", "bleu")])
    with pytest.raises(DataError, match=r"'bleu' .*'blue'"):
        corrected(open_data(data), tmp_path / "file.csv")
    (tmp_path / "file.csv").write_text("path,label\na,b\n")
    with pytest.raises(DataError, match="item and corrected"):
        corrected(open_data(data), tmp_path / "file.csv")
    assert main(["train", str(data), "--corrections", str(tmp_path / "no.csv")]) == 2


def test_a_class_that_loses_its_last_item_is_gone(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", vectors=np.eye(4), labels=[0, 0, 1, 2])
    write_corrections(tmp_path / "file.csv", [Correction("row 2", "1", "2")])
    found = corrected(open_data(tmp_path / "d.npz"), tmp_path / "file.csv")
    assert (found.class_names, found.labels.tolist()) == (("0", "2"), [0, 0, 1, 1])


def test_an_item_goes_to_the_side_of_its_class(data: Path, tmp_path: Path) -> None:
    lines = [
        f"{name}/{i}.png,{name},{'test' if 'sea' in name else 'train'}"
        for name in NAMES
        for i in range(4)
    ]
    (data / "list.csv").write_text("path,label,split\n" + "\n".join(lines))
    write_corrections(tmp_path / "file.csv", [Correction("red/0.png", "red", "sea/gray")])
    found = corrected(open_data(data / "list.csv"), tmp_path / "file.csv")
    assert found.split is not None
    assert found.split[0] == "test"


def test_an_item_stays_on_a_side_where_its_class_is(data: Path, tmp_path: Path) -> None:
    """A query stays a query, and with classes on both sides an item of training stays there."""
    sides = {"blue": ["train", "query"], "green": ["query", "gallery"], "red": ["train", "gallery"]}
    lines = [f"{name}/{i}.png,{name},{sides[name][i // 2]}" for name in sides for i in range(4)]
    (data / "list.csv").write_text("path,label,split\n" + "\n".join(lines))
    rows = [
        Correction("blue/0.png", "blue", "red"),
        Correction("blue/3.png", "blue", "green"),
        Correction("red/0.png", "red", "green"),  # which is not in training
    ]
    write_corrections(tmp_path / "file.csv", rows)
    found = corrected(open_data(data / "list.csv"), tmp_path / "file.csv")
    assert found.split is not None
    side_of = dict(zip(found.names, found.split.tolist(), strict=True))
    changed = [side_of[f"{item}.png"] for item in ("blue/0", "blue/3", "red/0")]
    assert changed == ["train", "query", "gallery"]


@pytest.mark.slow
def test_train_applies_them_and_all_later_commands_too(data: Path, tmp_path: Path) -> None:
    """The run keeps its own copy; the data are as before; index and search see the new label."""
    file, run = tmp_path / "file.csv", tmp_path / "run"
    write_corrections(file, [Correction("red/0.png", "red", "blue")])
    bytes_before = {p: digest(p.read_bytes()) for p in data.rglob("*.png")}
    flags = ["--preset", "small", "--epochs", "1", "--dim", "8", "--size", "24"]
    flags += ["--batch-size", "8"]
    wanted = ["train", str(data), "--out", str(run), "--corrections", str(file)]
    assert main([*wanted, *flags]) == 0
    file.unlink()
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert Run.open(run).corrections == run / "corrected.csv"
    assert main(["evaluate", str(run)]) == 0
    update_index(run, None)
    index = FolderIndex.load(run / "index")
    assert index.get([str(data / "red" / "0.png")])[0].label == "blue"
    assert {p: digest(p.read_bytes()) for p in data.rglob("*.png")} == bytes_before
    assert COLUMNS == ("item", "label", "corrected")
