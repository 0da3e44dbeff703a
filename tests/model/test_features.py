"""Features of a fixed backbone: kept, and made again where the kept ones are damaged."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.detect import open_data
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.feature_store import FeatureStore, picture_keys
from nofuss.model.features import backbone_features, features_of, run_over
from nofuss.model.inference import for_inference
from tests.tiny_run import draw, write_pictures


@pytest.fixture
def pictures(tmp_path: Path) -> Collection:
    return open_data(write_pictures(tmp_path / "data"))


@pytest.fixture
def embedder() -> Embedder:
    found = build_embedder("convnet", dim=4, channels=3)
    found.backbone.preprocessing = Preprocessing(size=16, resize=16)
    return found


def kept_in(cache: Path) -> Path:
    (file,) = cache.glob("features-*.sqlite")
    return file


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each pass of a backbone was for."""
    counts: list[int] = []

    def counting(model: Any, collection: Collection, **options: Any) -> Tensor:
        counts.append(len(collection))
        return run_over(model, collection, **options)

    monkeypatch.setattr("nofuss.model.features.run_over", counting)
    return counts


def test_one_changed_bit_is_noticed(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int]
) -> None:
    """An exponent that grows by a bit is a feature that rules every distance."""
    features = backbone_features(embedder, pictures)
    content = bytearray(kept_in(cache).read_bytes())
    stored = features[7].numpy().tobytes()
    place = content.find(stored[:64])
    assert place > 0
    content[place + 3] ^= 0x40
    kept_in(cache).write_bytes(content)
    with pytest.warns(UserWarning, match=r"sqlite is damaged \(1 features have .* made again"):
        assert torch.equal(backbone_features(embedder, pictures), features)
    assert torch.equal(backbone_features(embedder, pictures), features)
    assert computed == [31, 1]


@pytest.mark.parametrize("content", [b"", b"no database at all" * 500, "another width"])
def test_a_file_that_is_no_store_does_not_stay(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int], content: Any
) -> None:
    features = backbone_features(embedder, pictures)
    if isinstance(content, bytes):
        kept_in(cache).write_bytes(content)
    else:
        store, keys = FeatureStore(kept_in(cache), 5), picture_keys(pictures)
        store.write(keys, np.zeros((31, 5), dtype=np.float32))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(backbone_features(embedder, pictures), features)
    assert bool(said) == bool(content)
    assert torch.equal(backbone_features(embedder, pictures), features)
    assert computed == [31, 31]


def test_a_schema_that_sqlite_can_t_even_quote_does_not_stay(cache: Path) -> None:
    store, key = FeatureStore(cache / "features-0.sqlite", 4), b"0" * 16
    store.write([key], np.ones((1, 4), dtype=np.float32))
    content = store.file.read_bytes()
    store.file.write_bytes(content.replace(b"CREATE TABLE", b"CREATE TABL\xff"))
    with pytest.warns(UserWarning, match="damaged"):
        assert not store.read([key])[1].any()
    assert not store.file.exists()


def test_only_new_and_changed_pictures_are_computed(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int]
) -> None:
    features = backbone_features(embedder, pictures)
    root = pictures.paths[0].parent.parent
    draw(0, 77).save(root / pictures.class_names[0] / "zz.png")
    changed = pictures.paths[20]
    draw(3, 99).save(changed)
    grown = open_data(root)
    found = backbone_features(embedder, grown)
    assert computed == [31, 2]
    order = [grown.paths.index(path) for path in pictures.paths if path != changed]
    expected = [i for i, path in enumerate(pictures.paths) if path != changed]
    assert torch.equal(found[order], features[expected])
    whole = FeatureStore(cache / "none", 256)
    assert not whole.read(picture_keys(grown))[1].any()
    fresh = features_of(for_inference(embedder).backbone, grown, store=None)
    assert torch.equal(found, fresh)  # the same bits as if all had been computed together


def test_a_table_over_the_same_pictures_computes_none(
    cache: Path,
    pictures: Collection,
    embedder: Embedder,
    computed: list[int],
    tmp_path: Path,
) -> None:
    told = list[tuple[str, int, int]]()
    backbone_features(embedder, pictures, progress=lambda *work: told.append(work))
    assert (told[0], told[-1]) == (
        ("computing features once", 0, 31),
        ("computing features once", 31, 31),
    )
    told.clear()
    rows = [f"{path},{path.parent.name}" for path in reversed(pictures.paths)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    again = open_data(tmp_path / "table.csv")
    backbone_features(embedder, again, progress=lambda *work: told.append(work))
    assert computed == [31]
    assert told == []


def test_what_was_computed_before_an_interruption_is_kept(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def interrupted(model: Any, collection: Collection, **options: Any) -> Tensor:
        counts.append(len(collection))
        if len(counts) == 3:
            raise KeyboardInterrupt
        return run_over(model, collection, **options)

    monkeypatch.setattr("nofuss.model.features.CHUNK", 10)
    monkeypatch.setattr("nofuss.model.features.run_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backbone_features(embedder, pictures)
    assert len(backbone_features(embedder, pictures)) == 31
    assert counts == [10, 10, 10, 10, 1]


def test_a_cache_that_can_t_be_written_costs_time_only(
    pictures: Collection, embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "file" / "cache"))
    first = backbone_features(embedder, pictures)
    assert torch.equal(backbone_features(embedder, pictures), first)


def test_reading_counts_as_use(cache: Path) -> None:
    store = FeatureStore(cache / "features.sqlite", 3)
    store.write([b"key"], np.ones((1, 3), dtype=np.float32))
    os.utime(store.file, (1, 1))
    assert store.read([b"key", b"other", b"key", b""])[1].tolist() == [True, False, True, False]
    assert store.file.stat().st_mtime > time.time() - 60


def test_links_and_pipes_are_left_alone(cache: Path) -> None:
    (cache / "thesis").write_bytes(b"")
    (cache / "link").symlink_to(cache / "thesis")
    os.mkfifo(cache / "pipe")
    for name in ("link", "pipe"):
        store = FeatureStore(cache / name, 3)
        store.write([b"key"], np.ones((1, 3), dtype=np.float32))
        assert not store.read([b"key"])[1].any()
    assert (cache / "thesis").read_bytes() == b""
    assert (cache / "link").is_symlink()


def test_two_processes_write_at_once(cache: Path) -> None:
    """Both sets are there afterwards."""
    script = (
        "import sys, numpy as np; from pathlib import Path;"
        "from nofuss.model.feature_store import FeatureStore as S;"
        "n = int(sys.argv[2]); s = S(Path(sys.argv[1]), 8);"
        "[s.write([bytes([n, i])], np.full((1, 8), i, dtype=np.float32)) for i in range(50)]"
    )
    file = cache / "features.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(file), str(n)]) for n in (1, 2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    keys = [bytes([n, i]) for n in (1, 2) for i in range(50)]
    features, is_known = FeatureStore(file, 8).read(keys)
    assert is_known.all()
    assert features[:, 0].tolist() == [*range(50), *range(50)]


def test_old_features_make_room_for_new_ones(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder.backbone.preprocessing = Preprocessing(size=10, resize=10)
    backbone_features(embedder, pictures)
    limit = 3.5 * kept_in(cache).stat().st_size
    monkeypatch.setattr("nofuss.data.cache.LIMIT", limit)
    for size in (12, 14, 16, 18):
        embedder.backbone.preprocessing = Preprocessing(size=size, resize=size)
        backbone_features(embedder, pictures)
        newest = max(cache.glob("features-*.sqlite"), key=lambda file: file.stat().st_mtime_ns)
    files = list(cache.glob("features-*.sqlite"))
    assert 2 <= len(files) <= 4  # of five; pages of a small file take more than its numbers
    assert newest in files


def test_features_beyond_the_limit_are_not_kept(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nofuss.data.cache.LIMIT", 10_000)
    features = backbone_features(embedder, pictures)
    assert not list(cache.glob("features-*.sqlite"))
    assert torch.equal(backbone_features(embedder, pictures), features)


def test_rows_that_are_learned_from_are_not_mirrored(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int]
) -> None:
    straight = backbone_features(embedder, pictures)
    embedder.backbone.mirror = True
    both = backbone_features(embedder, pictures)
    mixed = backbone_features(embedder, pictures, straight=np.arange(20))
    assert embedder.backbone.mirror
    assert torch.equal(mixed, torch.cat([straight[:20], both[20:]]))
    assert not torch.equal(straight, both)
    assert computed == [31, 31]  # each way once, whatever is asked later
