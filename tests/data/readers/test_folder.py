"""Folders of class folders, the tidy and the untidy."""

import os
import shutil
from pathlib import Path

import pytest

from nofuss.config import Options
from nofuss.data.decode import FORMATS
from nofuss.data.open import open_data
from nofuss.data.readers.folder import (
    BY_FOLDER,
    Labelling,
    check_used,
    find_pictures,
    labelling_of,
)
from nofuss.errors import DataError, UsageError


def test_the_class_is_the_folder_that_holds_the_picture(photos: Path, draw) -> None:
    draw("photos/more/owl/x.JPG")
    data = open_data(photos)
    assert data.class_names == ("more/owl", "robin", "tit", "wren")
    assert data.names[0] == "more/owl/x.JPG"
    for path, label in zip(data.paths, data.labels, strict=True):
        assert str(path.parent).endswith(data.class_names[label])


def test_what_is_skipped_is_counted(photos: Path, draw) -> None:
    draw("photos/loose.png")
    (photos / ".hidden.png").touch()
    (photos / "tit" / "notes.txt").touch()
    (photos / "empty").mkdir()
    os.mkfifo(photos / "tit" / "pipe.png")
    data = open_data(str(photos))
    assert len(data) == 9
    skipped = {"tit/pipe.png", "tit/notes.txt", "empty", ".hidden.png", "loose.png"}
    assert {name for name, _ in data.skipped} == skipped
    assert {note.rpartition(": ")[2] for note in data.notes} == skipped
    assert all(note.startswith("1 ") for note in data.notes)
    assert len(find_pictures(photos)) == 10


def test_the_formats_that_are_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError) as refused:
        open_data(tmp_path)
    for name in ("JPEG", "AVIF", "HEIF"):
        assert (name in str(refused.value)) == (name in FORMATS)


def test_a_labelling_must_be_used(photos: Path) -> None:
    outer = Labelling(class_level=1)
    check_used(open_data(photos, labelling=outer), outer)
    check_used(open_data(photos, labelling=outer).subset([0]), BY_FOLDER)
    for opened in (open_data(photos), open_data(photos, labelling=Labelling(label_pattern="^."))):
        with pytest.raises(UsageError, match="labels of its own"):
            check_used(opened, outer)


def test_links_are_followed_once_and_never_in_circles(photos: Path) -> None:
    (photos / "wren" / "up").symlink_to(photos, target_is_directory=True)
    (photos / "a copy of wren").symlink_to(photos / "wren", target_is_directory=True)
    (photos / "itself.png").symlink_to(photos / "itself.png")
    data = open_data(photos)
    assert data.class_names == ("robin", "tit", "wren")
    assert len(data) == 9


def test_names_of_any_bytes(photos: Path, draw) -> None:
    picture = draw("photos/tit/0.png").read_bytes()
    odd = [b"new\nline", b"not utf-8 \xff", "übergrößenträger 鳥".encode()]
    for name in odd:
        folder = os.fsencode(photos) + b"/" + name
        os.mkdir(folder)
        Path(os.fsdecode(folder + b"/" + name + b".png")).write_bytes(picture)
    data = open_data(photos)
    assert {"new\\nline", "not utf-8 \\xff", "übergrößenträger 鳥"} < set(data.class_names)
    assert all(name.isprintable() for name in data.names)
    assert len(data.fingerprint()) == 32


def test_names_that_look_the_same_are_noted(photos: Path, draw) -> None:
    """As where a Mac has written one of two folders: é in one character, or as e and an accent."""
    for name in ("caf\u00e9", "cafe\u0301"):
        draw(f"photos/{name}/0.png")
    data = open_data(photos)
    assert data.num_classes == 5
    (note,) = data.notes
    assert "caf\u00e9" in note


def test_pictures_outside_class_folders_may_be_kept_without_a_label(draw, tmp_path: Path) -> None:
    for name in ("train/a/1", "train/direct", "test/b/1", "loose", "icons/c/1"):
        draw(f"d/{name}.png")
    data = open_data(tmp_path / "d", unlabelled=True)
    assert data.names == ("loose.png", "test/b/1.png", "train/a/1.png", "train/direct.png")
    assert data.labels.tolist() == [-1, 1, 0, -1]
    assert data.split is None
    assert [name for name, _ in data.skipped] == ["icons/c/1.png"]
    flat = open_data(tmp_path / "d" / "train" / "a", unlabelled=True)
    assert (flat.names, flat.is_labelled, flat.notes) == (("1.png",), False, ())
    deep = open_data(tmp_path / "d", labelling=Labelling(class_level=2), unlabelled=True)
    assert not deep.is_labelled
    (remark,) = deep.remarks
    assert "--class-level is 2" in remark


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folders_named_train_and_test_are_the_split(draw, tmp_path: Path, held_out: str) -> None:
    draw("d/train/robin/0.png")
    draw("d/train/wren/0.png")
    draw(f"d/{held_out}/tit/0.png")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("robin", "tit", "wren")
    sides = {data.class_names[label]: side for label, side in zip(data.labels, data.split)}  # noqa: B905
    assert sides == {"robin": "train", "tit": "test", "wren": "train"}


def test_the_names_of_the_split_are_read_in_any_case(draw, tmp_path: Path) -> None:
    """As in Fruits-360."""
    for name in ("Training/Apple Red", "Training/Pear", "Test/Kiwi"):
        draw(f"d/{name}/0.jpg")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("Apple Red", "Kiwi", "Pear")
    assert data.split is not None
    assert data.split.tolist() == ["test", "train", "train"]


def test_pictures_right_in_train_have_no_class(draw, tmp_path: Path) -> None:
    for name in ("train/robin/1.png", "train/loose.png", "test/wren/1.png", "test/loose.png"):
        draw(f"d/{name}")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("robin", "wren")
    assert [name for name, _ in data.skipped] == ["test/loose.png", "train/loose.png"]
    for holder in ("train/robin", "test/wren"):
        shutil.rmtree(tmp_path / "d" / holder)
    with pytest.raises(DataError, match="test and train"):
        open_data(tmp_path / "d")


def test_a_folder_beside_train_and_test_is_left_out_in_words(draw, tmp_path: Path) -> None:
    """As GroceryStoreDataset is published: icons of the classes beside train, val and test."""
    for side, number in (("train", 0), ("val", 1), ("test", 2)):
        draw(f"d/{side}/Fruit/Apple/{number}.png")
        draw(f"d/{side}/Vegetables/Leek/{number}.png")
    for name in "abcdef":
        draw(f"d/iconic-images/Fruit/{name}/{name}.png")
    draw("d/cover.png")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("Fruit/Apple", "Vegetables/Leek")
    assert data.layout == "class folders in test and train and val"
    assert data.split is not None
    assert list(data.split) == ["test", "test", "train", "train", "test", "test"]
    (note,) = (note for note in data.notes if "iconic" in note)
    assert note.startswith("6 ")
    assert "iconic-images/Fruit/a/a.png" in note


def test_train_may_be_the_class_of_trains(draw, tmp_path: Path) -> None:
    for name in ("train/0.png", "test/1.png", "bus/2.png"):
        draw(f"d/{name}")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("bus", "test", "train")
    assert data.split is None


def test_folders_in_folders(draw, tmp_path: Path) -> None:
    for name in ("birds/wren/a/0.png", "birds/wren/b/1.png", "birds/tit/2.png", "fish/3.png"):
        draw(f"d/{name}")
    data = open_data(tmp_path / "d")
    assert data.class_names == ("birds/tit", "birds/wren/a", "birds/wren/b", "fish")
    (note,) = data.notes
    assert "`nofuss train --class-level 1`" in note
    with pytest.raises(DataError, match=r"--class-level is 4"):
        open_data(tmp_path / "d", labelling=Labelling(class_level=4))
    outer = open_data(tmp_path / "d", labelling=Labelling(class_level=1))
    assert outer.class_names == ("birds", "fish")
    assert not outer.notes
    assert not open_data(tmp_path).notes  # one class would be no classes
    two = open_data(tmp_path / "d", labelling=Labelling(class_level=2))
    assert two.class_names == ("birds/tit", "birds/wren", "fish")


def test_the_class_is_in_the_file_name(draw, tmp_path: Path) -> None:
    for name in ("robin_1.png", "robin_2.png", "wren_3.png", "wren-4.png"):
        draw(f"d/{name}")
    with pytest.raises(DataError, match=r"--label-pattern '\^\(\.\+\)_'"):
        open_data(tmp_path / "d")
    both = open_data(tmp_path / "d", labelling=Labelling(label_pattern="^([a-z]+)"))
    assert both.class_names == ("robin", "wren")
    part = open_data(tmp_path / "d", labelling=Labelling(label_pattern="^(.+)_"))
    assert part.names == ("robin_1.png", "robin_2.png", "wren_3.png")
    assert [name for name, _ in part.skipped] == ["wren-4.png"]
    with pytest.raises(DataError, match="none of the 4"):
        open_data(tmp_path / "d", labelling=Labelling(label_pattern="(owl)"))


def test_folders_that_hold_nothing_of_use_say_so(tmp_path: Path, draw) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.xyz").touch()
    draw("flat/1.png")
    for name in ("nowhere", "empty", "flat", "flat/1.png", "data.xyz"):
        with pytest.raises(DataError, match=name):
            open_data(tmp_path / name)
    for name in ("x" * 5000, "~nosuchuser/x"):
        with pytest.raises(DataError, match="does not exist"):
            open_data(name)


def test_a_pattern_of_brackets_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--label-pattern") as error:
        labelling_of(Options(label_pattern="(" * 3000))
    assert len(str(error.value)) < 500
