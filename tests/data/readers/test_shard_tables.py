"""Parquet and Hugging Face datasets saved to disk."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from nofuss.data import items
from nofuss.data.decode import decode
from nofuss.data.items import read_item
from nofuss.data.open import open_data
from nofuss.data.scan import scan_pictures
from nofuss.errors import DataError

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["robin", "wren"], "_type": "ClassLabel"},
}


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    with io.BytesIO() as buffer:
        Image.fromarray(pixels).save(buffer, "JPEG")
        return buffer.getvalue()


def images(count: int, first: int = 0) -> Any:
    """A table as `datasets` stores it: struct<bytes, path>, numbers for classes."""
    cells = [{"bytes": picture(first + i), "path": f"{first + i}.jpg"} for i in range(count)]
    columns = {
        "image": pyarrow.array(cells, IMAGE),
        "label": pyarrow.array([i % 2 for i in range(count)]),
    }
    described = json.dumps({"info": {"features": FEATURES}})
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": described})


def save_to_disk(table: Any, folder: Path, *, files: int = 1) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    share = -(-len(table) // files)
    for i, name in enumerate(names):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table.slice(i * share, share), max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def check_pictures(data: Any, first: int = 0) -> None:
    for number, path in enumerate(data.paths, start=first):
        assert read_item(path) == picture(number)
        assert decode(path).size == (24, 20)


def test_parquet_with_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "birds.parquet"
    parquet.write_table(images(9), file, row_group_size=2)
    data = open_data(file)
    assert data.describe() == "2 classes, 9 images, Parquet"
    assert data.class_names == ("robin", "wren")
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    check_pictures(data)
    monkeypatch.setattr(items, "LARGEST_GROUP", 9000)  # room for two groups
    check_pictures(data)
    assert read_item(data.paths[0]) == picture(0)  # after its group was dropped
    assert scan_pictures(data).problems == ()
    assert data.names[3] == "birds.parquet#3"


def test_parquet_as_the_hub_lays_it_out(tmp_path: Path) -> None:
    (tmp_path / "d" / "data").mkdir(parents=True)
    for side, first, count in (("train", 0, 4), ("test", 4, 2)):
        file = tmp_path / "d" / "data" / f"{side}-00000-of-00001.parquet"
        parquet.write_table(images(count, first), file)
    data = open_data(tmp_path / "d")
    assert data.describe() == "2 classes, 6 images, Parquet, 2 files"
    assert data.split is not None
    assert data.split.tolist() == ["test"] * 2 + ["train"] * 4


def test_parquet_with_plain_bytes_and_names(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"jpg": [picture(0), picture(1)], "category": ["tit", "owl"], "split": ["train", "test"]}
    )
    parquet.write_table(table, tmp_path / "plain.parquet", compression="zstd")
    data = open_data(tmp_path / "plain.parquet")
    assert data.class_names == ("owl", "tit")
    assert data.split is not None
    assert data.split.tolist() == ["train", "test"]
    assert read_item(data.paths[1]) == picture(1)


def test_parquet_with_paths(tmp_path: Path, draw: Any) -> None:
    draw("photos/a.png")
    draw("photos/b.png", seed=1)
    table = pyarrow.table({"path": ["photos/a.png", "photos/b.png"], "label": [10, 9]})
    parquet.write_table(table, tmp_path / "list.parquet")
    data = open_data(tmp_path / "list.parquet")
    assert data.class_names == ("9", "10")
    assert data.names == ("photos/a.png", "photos/b.png")
    table = pyarrow.table({"path": ["photos/a.png", "photos/none.png", None], "label": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "list.parquet")
    with pytest.raises(DataError, match=r"row 1: no file photos/none\.png; row 2: no file None"):
        open_data(tmp_path / "list.parquet")


def test_parquet_with_images_that_are_paths(tmp_path: Path, draw: Any) -> None:
    """As `datasets` writes a folder of pictures that it has not read."""
    cells = [{"bytes": None, "path": str(draw(f"{i}.png", seed=i))} for i in range(3)]
    table = pyarrow.table({"image": pyarrow.array(cells, IMAGE), "label": ["a", "b", "a"]})
    parquet.write_table(table, tmp_path / "d.parquet")
    data = open_data(tmp_path / "d.parquet")
    assert data.names == ("0.png", "1.png", "2.png")
    assert scan_pictures(data).problems == ()


def test_what_is_wrong_with_parquet_is_said(tmp_path: Path) -> None:
    (tmp_path / "noise.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    with pytest.raises(DataError, match=r"noise\.parquet"):
        open_data(tmp_path / "noise.parquet")
    parquet.write_table(pyarrow.table({"x": [1.0], "y": [2.0]}), tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match="has the columns x, y; expected pictures"):
        open_data(tmp_path / "numbers.parquet")
    table = pyarrow.table({"jpg": [picture(0), picture(1)], "label": ["a", None]})
    parquet.write_table(table, tmp_path / "missing.parquet")
    with pytest.raises(DataError, match=r"without a label: missing\.parquet#1"):
        open_data(tmp_path / "missing.parquet")
    table = pyarrow.table({"jpg": [picture(0), None], "label": ["a", "b"]})
    parquet.write_table(table, tmp_path / "empty.parquet")
    (problem,) = scan_pictures(open_data(tmp_path / "empty.parquet")).problems
    assert (problem.item, problem.detail) == (1, "no picture in this row")


def test_a_group_of_rows_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(images(4), tmp_path / "d.parquet")
    monkeypatch.setattr(items, "LARGEST_GROUP", 1000)
    problems = scan_pictures(open_data(tmp_path / "d.parquet")).problems
    assert len(problems) == 4
    assert "more than the limit of 1,000" in problems[0].detail


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    data = open_data(save_to_disk(images(7), tmp_path / "d", files=2))
    assert data.describe() == "2 classes, 7 images, Hugging Face dataset on disk"
    assert data.class_names == ("robin", "wren")
    check_pictures(data)
    assert scan_pictures(data).problems == ()


def test_a_dictionary_of_datasets_is_a_split(tmp_path: Path) -> None:
    save_to_disk(images(4), tmp_path / "d" / "train")
    save_to_disk(images(2, 4), tmp_path / "d" / "test")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = open_data(tmp_path / "d")
    assert data.split is not None
    assert data.split.tolist() == ["train"] * 4 + ["test"] * 2
    check_pictures(data)


def test_what_is_wrong_with_a_dataset_is_said(tmp_path: Path) -> None:
    broken = save_to_disk(images(3), tmp_path / "broken")
    (file,) = broken.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"\.arrow"):
        open_data(broken)
    (broken / "state.json").write_text("[]")
    with pytest.raises(DataError, match="lists no data files"):
        open_data(broken)
    (broken / "state.json").write_text('{"_data_files": [{"filename": "../../x"}]}')
    (broken / "x").touch()
    with pytest.raises(DataError, match=r"x does not end in \.arrow"):
        open_data(broken)
    (broken / "state.json").write_text('{"_data_files": [3]}')
    with pytest.raises(DataError, match="lists no data files"):
        open_data(broken)
