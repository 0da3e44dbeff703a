"""Small files of strangers that would cost much, and values that no writer of ours writes."""

import json
import struct
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from nofuss.config import Options
from nofuss.data.collection import printable, relative
from nofuss.data.open import open_data
from nofuss.data.readers.benchmarks import _check_unpacked
from nofuss.data.readers.folder import labelling_of, open_folder
from nofuss.data.readers.table import by_number_or_name
from nofuss.errors import DataError, RunError, UsageError
from nofuss.evaluate.protocol import are_class_sums
from nofuss.files import write_by_content, write_json
from nofuss.model.backbones import read_weights
from nofuss.model.saved import FORMAT
from nofuss.run.choice import Choice
from nofuss.run.marks import FILE, read_marks
from nofuss.search.json_response import Json
from nofuss.search.lessons import MAP, Step
from nofuss.search.searchable import Pictures
from nofuss.training.train import run_training
from tests.tiny_run import draw, train_vectors

HALF = "\ud800"
"""Half of a pair of surrogates: JSON and arrays may hold it, UTF-8 may not."""


# Tables and arrays


def test_a_long_label_does_not_make_all_of_them_long() -> None:
    tracemalloc.start()
    labels, names = by_number_or_name(["x" * 4000, *"ab" * 5000])
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert names == ["a", "b", "x" * 4000]
    assert labels[:3].tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="has 5,000 characters; expected at most 4,096"):
        by_number_or_name(["x" * 5000, "y"])


def test_a_table_of_many_columns_is_refused(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(20_000))
    (tmp_path / "x.csv").write_text(f"path,label,{names}\na.png,x\n")
    with pytest.raises(DataError, match="has 20,002 columns; at most 1,000"):
        open_data(tmp_path / "x.csv")


def test_half_a_surrogate_is_an_escape() -> None:
    assert printable(f"a{HALF}") == "a\\ud800"
    assert by_number_or_name([f"a{HALF}", "b"])[1] == ["a\\ud800", "b"]
    assert Json({"label": HALF}).body == b'{"label":"\\ud800"}'


def test_labels_with_half_a_surrogate_are_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    labels = np.array([f"{HALF}{i // 6}" for i in range(72)])
    np.savez(file, vectors=np.random.default_rng(0).normal(size=(72, 4)), labels=labels)
    assert open_data(file).class_names[0] == "\\ud8000"


@pytest.mark.parametrize(
    "split",
    [np.zeros(4, [("a", int)]), np.array([b"\xff"] * 4), np.array("train"), np.zeros(4)],
    ids=["structured", "bytes", "one for all", "numbers"],
)
def test_a_split_that_is_none(split: np.ndarray, tmp_path: Path) -> None:
    vectors = np.eye(4, dtype=np.float32)
    np.savez(tmp_path / "x.npz", vectors=vectors, labels=[0, 0, 1, 1], split=split)
    with pytest.raises(DataError, match="split must have one entry per item"):
        open_data(tmp_path / "x.npz")


def test_pairs_that_are_a_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", vectors=np.eye(4, dtype=np.float32), pairs=np.array(3))
    with pytest.raises(DataError, match="pairs"):
        open_data(tmp_path / "x.npz")


def test_a_compressed_bomb_in_a_matlab_file() -> None:
    packed = zlib.compress(bytes(2**27))
    data = bytes(126) + b"IM" + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    with pytest.raises(ValueError, match="unpacked"):
        _check_unpacked(data + packed)
    _check_unpacked(data[:128])


def test_each_picture_beside_train_and_test_is_looked_at_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("train/a", "train/b", "test/c", "test/d", *(f"other{i}" for i in range(400))):
        (tmp_path / folder).mkdir(parents=True)
        draw(0, 0).save(tmp_path / folder / "x.png")
    looks = Counter[Path]()

    def counted(picture: Path, folder: Path) -> Path:
        looks[picture] += 1
        return relative(picture, folder)

    monkeypatch.setattr("nofuss.data.readers.folder.relative", counted)
    assert len(open_folder(tmp_path)) == 4
    assert max(looks.values()) < 10  # not once for each of the folders


# Pictures behind an index


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


# Runs


def test_a_saved_place_for_curves_is_not_written_to(tmp_path: Path) -> None:
    run = train_vectors(tmp_path)
    stored = json.loads((run / "config.json").read_text())
    stored["tensorboard"] = str(tmp_path / "outside")
    stored.pop("checksum", None)
    (run / "config.json").write_text(json.dumps(stored))
    (run / "report.html").unlink()  # else nothing is left to do
    run_training(Options(out=run, resume=True))
    assert (run / "report.html").is_file()
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("same", ["1", "0", '"true"', "[]"])
def test_a_mark_is_true_false_or_null(same: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f'{{"query": "a", "item": "b", "same": {same}}}\n')
    assert read_marks(tmp_path).torn == 1


@pytest.mark.parametrize(
    "sums",
    [
        {},
        5,
        {"queries": [10**9], "recall@1": [1], "map@r": [1]},
        {"queries": [-1], "recall@1": [1], "map@r": [1]},
        {"queries": ["x"], "recall@1": [1], "map@r": [1]},
        {"queries": [3, 3], "recall@1": [1], "map@r": [1, 1]},
        {"queries": [3], "recall@1": [4], "map@r": [1]},
        {"queries": [[1]], "recall@1": [1], "map@r": [1]},
    ],
)
def test_scores_of_folds_that_are_none(sums: object) -> None:
    assert not are_class_sums(sums)
    assert are_class_sums({"queries": [3, 4], "recall@1": [1.5, 0], "map@r": [3, 4]})


CHOICE = {
    "kept": "closed form",
    "recipe": {"root": True, "shrinkage": 0.5, "emphasis": 1.0},
    "dim": 8,
    "folds": 4,
    "classes": 12,
    "items": 72,
    "scores": {},
    "gains": {},
}


@pytest.mark.parametrize(
    "forged",
    [
        {"dim": "x"},
        {"kept": [1]},
        {"kept": "x"},
        {"recipe": {"root": True, "center": True, "shrinkage": 0.5}},
        {"recipe": {"root": 1, "shrinkage": 0.5, "emphasis": 1.0}},
        {"scores": 5},
        {"scores": {"a": {}}},
        {"curve": [[1]]},
    ],
)
def test_a_choice_that_training_did_not_make(forged: dict[str, object]) -> None:
    assert Choice.from_dict(CHOICE).dim == 8
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Choice.from_dict(CHOICE | forged)


def test_weights_of_a_lesson_without_a_head(tmp_path: Path) -> None:
    weights = save({"head.weight": torch.ones(())})
    checksum = write_by_content(tmp_path, "weights", "safetensors", weights)
    write_json(tmp_path / "model.json", {"format": FORMAT, "weights": checksum})
    save_file({"map": torch.eye(3).double()}, tmp_path / MAP)
    with pytest.raises(RunError, match="not a map of embeddings"):
        _ = Step(tmp_path, 1, "digest").matrix


def test_weights_in_an_archive_on_several_disks(tmp_path: Path) -> None:
    """Found by fuzzing: such an end made zipfile raise before the file was read."""
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 0, 2)
    (tmp_path / "w.pth").write_bytes(bytes(100) + locator + b"PK\x05\x06" + bytes(18))
    with pytest.raises(RunError, match="copy or download it again"):
        read_weights(tmp_path / "w.pth")


def test_a_pattern_of_brackets_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular expression") as error:
        labelling_of(Options(label_pattern="(" * 3000))
    assert len(str(error.value)) < 500


def test_a_home_that_nobody_has_is_one_line() -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_data(Path("~nosuchuser/x"))
