"""`nofuss index`: only what changed is embedded, whatever came before, and what is left out."""

import csv
import os
import shutil
from pathlib import Path

import pytest
import torch

import nofuss
from nofuss.cli import main
from nofuss.errors import UsageError
from nofuss.search import Index
from nofuss.search.update import Changes, recall, update_index
from tests.tiny_run import CLASSES, draw, draw_folder, untrained_pictures, write_pictures


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "data", per_class=3)


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    return untrained_pictures(data, tmp_path / "run")


def index_of(run: Path) -> Index:
    return Index.load(run / "index")


def test_only_what_changed_is_embedded(run: Path, data: Path) -> None:
    assert update_index(run, data) == Changes(added=19)
    assert update_index(run, None) == Changes(unchanged=19)  # the run's own data by default
    before = index_of(run)
    folder = data / CLASSES[3]
    draw(0, 99).save(folder / "0<i>.png")  # other content
    (folder / "1<i>.png").unlink()
    os.utime(folder / "2<i>.png", (0, 0))  # touched, the same content
    (data / "new class").mkdir()
    draw(5, 50).save(data / "new class" / "a.png")
    changes = update_index(run, data)
    assert changes == Changes(added=1, changed=1, removed=1, unchanged=17)
    assert changes.describe() == "1 new, 1 changed, 1 removed, 17 unchanged"
    after = index_of(run)
    assert after.get([str(data / "new class" / "a.png")])[0].label == "new class"
    [new], [old] = (
        index.get([str(folder / "0<i>.png")], vectors=True) for index in (after, before)
    )
    assert new.vector is not None
    assert old.vector is not None
    assert not torch.equal(new.vector, old.vector)
    # Whatever the history, the vectors are those that embedding gives.
    torch.testing.assert_close(
        after.vectors, nofuss.load(run).embed(after.names), atol=1e-5, rtol=0
    )
    assert sorted(after.names) == sorted(str(path) for path in data.rglob("*.png"))
    assert recall(after, k=3) == 1.0


def test_what_training_used_an_item_for_is_kept_when_it_changes(run: Path, data: Path) -> None:
    update_index(run, data)
    index = index_of(run)
    index.folder = run / "index"
    index.put([item._replace(split="test") for item in index.items()])
    index.commit(index.about)
    draw(4, 7).save(data / CLASSES[3] / "0<i>.png")
    assert update_index(run, data).changed == 1
    assert {item.split for item in index_of(run).items()} == {"test"}


def test_a_file_rewritten_at_once_is_noticed(run: Path, data: Path) -> None:
    """Same size, same time of change: a clock's tick is too coarse for a fresh file."""
    file = data / "plain" / "0<i>.bmp"
    draw(0, 1).save(file)
    update_index(run, data)
    status = file.stat()
    draw(4, 1).save(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert update_index(run, data).changed == 1


def test_what_can_not_be_read_is_named_and_leaves_the_index(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update_index(run, data)
    (data / "plain" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    (data / "plain" / "empty.png").write_bytes(b"")
    (data / "six" / "0<i>.png").write_bytes(b"damaged since")
    if os.getuid():
        (data / "six" / "1<i>.png").chmod(0)
    capsys.readouterr()
    assert main(["index", str(run), str(data)]) == 0
    printed = capsys.readouterr().out
    assert f"{3 + bool(os.getuid())} unreadable: {18 - bool(os.getuid())} items" in printed
    assert "broken.jpg" in printed
    assert "empty.png: empty file" in printed
    assert str(data / "six" / "0<i>.png") not in index_of(run)


def test_other_folders_stay_and_can_be_removed(run: Path, data: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    draw(2, 5).save(inbox / "loose.png")
    update_index(run, data)
    update_index(run, inbox)
    assert len(index_of(run)) == 20
    shutil.rmtree(inbox)
    assert update_index(run, inbox, remove=True) == Changes(removed=1)
    assert list(index_of(run).about.sources) == [str(data)]
    with pytest.raises(UsageError, match="holds nothing of"):
        update_index(run, inbox, remove=True)
    # However a folder is spelled, its pictures are not indexed twice.
    assert update_index(run, data / ".." / data.name) == Changes(unchanged=19)


def test_pictures_outside_class_folders_are_indexed_and_other_files_named(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(2, 5).save(data / "loose.png")
    (data / "plain" / "notes.txt").write_text("no picture")
    assert main(["index", str(run), str(data)]) == 0
    printed = capsys.readouterr().out
    assert "; 1 without a label\n" in printed
    assert "20 new: 20 items" in printed
    assert "notes.txt" in printed
    assert "loose.png" not in printed  # it is not skipped
    assert index_of(run).get([str(data / "loose.png")])[0].label is None


def test_a_class_folder_seen_alone_keeps_its_label(run: Path, data: Path) -> None:
    update_index(run, data)
    update_index(run, data / "plain")
    assert index_of(run).get([str(data / "plain" / "again.png")])[0].label == "plain"


def test_new_labels_and_columns_are_not_called_unchanged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = sorted(draw_folder(tmp_path / "shop", ("ant", "bee"), each=5).rglob("*.png"))
    table = tmp_path / "shop" / "list.csv"

    def write(prices: list[object], *, ants: int = 5) -> None:
        with table.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "label", "price"])
            for i, (picture, price) in enumerate(zip(pictures, prices, strict=True)):
                rows.writerow([picture, "ant" if i < ants else "bee", price])

    write([*range(10)])
    update_index(run, table)
    os.utime(pictures[0], (0, 0))  # touched: nothing that a user calls a change
    write([0.5, 1.5, *range(2, 10)], ants=6)
    vectors = index_of(run).vectors
    assert update_index(run, table) == Changes(revised=3, unchanged=7)
    assert torch.equal(index_of(run).vectors, vectors)
    assert index_of(run).labels.count("ant") == 6
    write(["dear", *range(1, 10)])  # another type, in its only source
    update_index(run, table)
    assert index_of(run).get([str(pictures[0])])[0].columns == {"price": "dear"}
    assert index_of(run).about.types["price"] == "text"
    other = tmp_path / "other.csv"
    other.write_text(f"path,label,price\n{pictures[0]},ant,7\n")
    assert main(["index", str(run), str(other)]) == 2
    said = capsys.readouterr().err
    assert f"column price is number in {other}, but text in {table}; rename it in one" in said
