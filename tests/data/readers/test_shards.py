"""Shards, Parquet and Hugging Face datasets on disk: read in order; damage is noticed."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from nofuss.data import items
from nofuss.data.decode import decode
from nofuss.data.items import file_of, read_item
from nofuss.data.open import open_data
from nofuss.data.readers.folder import Labelling
from nofuss.data.scan import scan_pictures
from nofuss.errors import DataError

IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["robin", "wren"], "_type": "ClassLabel"},
}


def picture(seed: int, kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    with io.BytesIO() as buffer:
        Image.fromarray(pixels).save(buffer, kind)
        return buffer.getvalue()


def write_shard(file: Path, members: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=kind) as shard:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return file


def sample(number: int, label: str) -> dict[str, bytes]:
    return {f"{number:04}.jpg": picture(number), f"{number:04}.cls": label.encode()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of four samples; numbers are labels, 10 after 9."""
    for shard in range(3):
        members: dict[str, bytes] = {}
        for i in range(4):
            members |= sample(4 * shard + i, "10" if i % 2 else "9")
        write_shard(tmp_path / "d" / f"photos-{shard:03}.tar", members)
    return tmp_path / "d"


def test_shards_are_read_in_order_without_unpacking(shards: Path) -> None:
    data = open_data(shards)
    assert data.class_names == ("9", "10")
    assert data.labels.tolist() == [0, 1] * 6
    for number, path in enumerate(data.paths):
        assert read_item(path) == picture(number)
        assert decode(path).size == (24, 20)
    assert scan_pictures(data).problems == ()
    assert data.names[:2] == ("photos-000.tar#0", "photos-000.tar#2")  # members 1 and 3 are labels
    assert data.fingerprint() == open_data(shards).fingerprint()
    assert len(open_data(shards / "photos-001.tar")) == 4


def test_pictures_beside_shards_are_not_left_out_silently(shards: Path) -> None:
    """As where somebody has left the archive of the photos among them."""
    (shards / "robin").mkdir()
    (shards / "robin" / "1.jpg").write_bytes(picture(0))
    data = open_data(shards)
    assert len(data) == 12
    assert [name for name, _ in data.skipped] == ["robin/1.jpg"]


def test_the_split_is_in_the_names_of_the_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "d" / "imagenet-train-000.tar", sample(0, "robin") | sample(1, "robin"))
    write_shard(tmp_path / "d" / "imagenet-val-000.tar", sample(2, "wren"))
    data = open_data(tmp_path / "d")
    assert data.split is not None
    assert data.split.tolist() == ["train", "train", "test"]


def test_the_name_of_a_shard_says_more_than_that_of_its_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("train-000", "val-000")):
        write_shard(tmp_path / "test" / f"{name}.tar", sample(number, "robin"))
    data = open_data(tmp_path / "test")
    assert data.split is not None
    assert data.split.tolist() == ["train", "test"]


@pytest.mark.parametrize("folders", [("Train", "TEST"), ("training", "eval")])
def test_the_split_is_in_the_names_of_folders(tmp_path: Path, folders: tuple[str, str]) -> None:
    for number, name in enumerate(folders):
        write_shard(tmp_path / "d" / name / "000.tar", sample(number, "robin"))
    data = open_data(tmp_path / "d")
    assert data.split is not None
    assert dict(zip(data.names, data.split, strict=True)) == {
        f"{folders[0]}/000.tar#0": "train",
        f"{folders[1]}/000.tar#0": "test",
    }


def test_labels_in_json_and_in_names(tmp_path: Path) -> None:
    members = {
        "a.json": json.dumps({"caption": "x", "label": "robin"}).encode(),
        "a.jpg": picture(0),
        "b.jpg": picture(1),
        "b.json": json.dumps({"cls": 3}).encode(),
    }
    data = open_data(write_shard(tmp_path / "json.tar", members))
    assert data.class_names == ("3", "robin")
    plain = write_shard(
        tmp_path / "plain.tar",
        {"robin/x_1.jpg": picture(0), "wren/y_2.png": picture(1, "PNG"), "wren/notes.txt": b"hm"},
        kind=tarfile.PAX_FORMAT,
    )
    data = open_data(plain)
    assert data.class_names == ("robin", "wren")
    assert [name for name, _ in data.skipped] == ["plain.tar/wren/notes.txt"]
    data = open_data(plain, labelling=Labelling(label_pattern=r"/(.)_\d"))
    assert data.class_names == ("x", "y")


def test_what_is_wrong_with_a_shard_is_said(tmp_path: Path) -> None:
    missing = sample(0, "robin") | {"0001.jpg": picture(1)}
    with pytest.raises(DataError, match=r"0001\.jpg"):
        open_data(write_shard(tmp_path / "missing.tar", missing))
    large = sample(0, "robin") | {"0001.jpg": picture(1), "0001.cls": b"x" * 2**17}
    with pytest.raises(DataError, match=r"0001\.cls: .*131,072"):
        open_data(write_shard(tmp_path / "large.tar", large))
    write_shard(tmp_path / "none.tar", {"a.txt": b"x"})
    (tmp_path / "noise.tar").write_bytes(b"x" * 4096)
    (tmp_path / "d.tar.gz").touch()
    for name in ("none.tar", "noise.tar", "d.tar.gz"):
        with pytest.raises(DataError, match=name.partition(".")[0]):
            open_data(tmp_path / name)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:2000],
        lambda content: bytes(100) + content,
        lambda content: content[:5632] + b"x" + content[5633:],
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Nothing of it is silently left out."""
    file = write_shard(tmp_path / "x.tar", {"a/1.png": bytes(5000), "a/2.png": bytes(5000)})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"x\.tar"):
        open_data(file)


def test_names_of_strangers(tmp_path: Path) -> None:
    """Whatever its name, a picture is read from the shard, and no name reaches a terminal raw."""
    names = ("../../9.png", "/etc/passwd.png", "a\x1b]0;x\x07/1\n.png", "a/2.png")
    file = write_shard(tmp_path / "x.tar", {name: picture(0, "PNG") for name in names})
    with tarfile.open(file, "a") as shard:
        link = tarfile.TarInfo("a/0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        shard.addfile(link)
    data = open_data(file)
    assert len(data) == 4
    assert [name for name, _ in data.skipped] == ["x.tar/a/0.jpg"]
    assert {file_of(path) for path in data.paths} == {file}
    assert all(each.isprintable() for each in (*data.names, *data.notes, *data.class_names))


# Parquet and Arrow


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
    with pytest.raises(DataError, match=r"row 1: .*photos/none\.png; row 2: .*None"):
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
    with pytest.raises(DataError, match="columns x, y"):
        open_data(tmp_path / "numbers.parquet")
    table = pyarrow.table({"jpg": [picture(0), picture(1)], "label": ["a", None]})
    parquet.write_table(table, tmp_path / "missing.parquet")
    with pytest.raises(DataError, match=r"missing\.parquet#1"):
        open_data(tmp_path / "missing.parquet")
    table = pyarrow.table({"jpg": [picture(0), None], "label": ["a", "b"]})
    parquet.write_table(table, tmp_path / "empty.parquet")
    (problem,) = scan_pictures(open_data(tmp_path / "empty.parquet")).problems
    assert problem.item == 1


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    data = open_data(save_to_disk(images(7), tmp_path / "d", files=2))
    assert data.class_names == ("robin", "wren")
    check_pictures(data)
    assert scan_pictures(data).problems == ()


def test_a_dictionary_of_datasets_is_a_split(tmp_path: Path) -> None:
    save_to_disk(images(4), tmp_path / "d" / "train")
    save_to_disk(images(2, 4), tmp_path / "d" / "Test")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "Test"]}')
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
    (broken / "x").touch()
    for state in ("[]", '{"_data_files": [{"filename": "../../x"}]}', '{"_data_files": [3]}'):
        (broken / "state.json").write_text(state)
        with pytest.raises(DataError, match=r"state\.json|x does not end in"):
            open_data(broken)
