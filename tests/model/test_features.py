"""Features of a fixed backbone: kept, and made again where the kept ones are damaged."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.config import Preprocessing
from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError, decode
from nofuss.data.open import open_data
from nofuss.data.scan import find_duplicates, report_on, scan_pictures
from nofuss.model.embedder import Embedder, build_embedder, for_inference
from nofuss.model.features import _compute, extract, features_of
from tests.tiny_run import draw, scene, write_pictures
from tests.training.together import fork_together


@pytest.fixture
def pictures(tmp_path: Path) -> Collection:
    return open_data(write_pictures(tmp_path / "data"))


@pytest.fixture
def embedder() -> Embedder:
    found = build_embedder("convnet", dim=4, channels=3)
    found.backbone.preprocessing = Preprocessing(size=16, resize=16)
    return found


def cached_features(embedder: Embedder, collection: Collection, **options: Any) -> Tensor:
    return features_of(for_inference(embedder).backbone, collection, **options).values


def kept_in(cache: Path) -> Path:
    (file,) = cache.glob("features-*.sqlite")
    return file


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each pass of a backbone was for."""
    counts: list[int] = []

    def counting(model: Any, collection: Collection, looks: Any, **options: Any) -> object:
        counts.append(len(collection))
        return _compute(model, collection, looks, **options)

    monkeypatch.setattr("nofuss.model.features._compute", counting)
    return counts


def test_one_changed_bit_is_noticed(
    cache: Path,
    pictures: Collection,
    embedder: Embedder,
    computed: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exponent that grows by a bit is a feature that rules every distance."""
    features = cached_features(embedder, pictures)
    content = bytearray(kept_in(cache).read_bytes())
    stored = features[7].numpy().tobytes()
    place = content.find(stored[:64])
    assert place > 0
    content[place + 3] ^= 0x40
    kept_in(cache).write_bytes(content)
    assert torch.equal(cached_features(embedder, pictures), features)
    assert "sqlite is damaged (1 values" in caplog.text
    assert torch.equal(cached_features(embedder, pictures), features)
    assert computed == [31, 1]


def test_the_content_of_a_picture_counts_not_its_place(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int]
) -> None:
    """Folders that were moved and copied, and a table of the same pictures in another order."""
    told = list[tuple[str, int, int]]()
    features = cached_features(embedder, pictures, progress=lambda *work: told.append(work))
    assert [told[0], told[-1]] == [("computing features", done, 31) for done in (0, 31)]
    told.clear()
    root = pictures.paths[0].parent.parent
    copied = shutil.copytree(root, root.with_name("copied"))
    paths = [copied / path.relative_to(root) for path in reversed(pictures.paths)]
    rows = [f"{path},{path.parent.name}" for path in paths]
    copied.with_suffix(".csv").write_text("\n".join(["path,label", *rows]))
    moved = root.rename(root.with_name("moved"))
    for data, order in ((moved, 1), (copied, 1), (copied.with_suffix(".csv"), -1)):
        found = cached_features(embedder, open_data(data), progress=lambda *work: told.append(work))
        assert torch.equal(found, features if order > 0 else features.flip(0))
    assert computed == [31]
    assert told == []


def test_a_picture_that_changes_meanwhile_is_not_kept(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its features belong to another content than its key."""
    expected, path = cached_features(embedder, pictures), pictures.paths[5]
    good = path.read_bytes()
    kept_in(cache).unlink()

    def changing(model: Any, collection: Collection, looks: Any, **options: Any) -> object:
        draw(3, 99).save(path)
        return _compute(model, collection, looks, **options)

    with monkeypatch.context() as patch:
        patch.setattr("nofuss.model.features._compute", changing)
        assert not torch.equal(cached_features(embedder, pictures)[5], expected[5])
    path.write_bytes(good)
    assert torch.equal(cached_features(embedder, pictures), expected)


def test_only_new_and_changed_pictures_are_computed(
    cache: Path, pictures: Collection, embedder: Embedder, computed: list[int]
) -> None:
    features = cached_features(embedder, pictures)
    root = pictures.paths[0].parent.parent
    draw(0, 77).save(root / pictures.class_names[0] / "zz.png")
    changed = pictures.paths[20]
    draw(3, 99).save(changed)
    grown = open_data(root)
    found = cached_features(embedder, grown)
    assert computed == [31, 2]
    order = [grown.paths.index(path) for path in pictures.paths if path != changed]
    expected = [i for i, path in enumerate(pictures.paths) if path != changed]
    assert torch.equal(found[order], features[expected])
    fresh = cached_features(embedder, grown, cached=False)
    assert torch.equal(found, fresh)  # the same bits as if all had been computed together


def test_what_was_computed_before_an_interruption_is_kept(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def interrupted(model: Any, collection: Collection, looks: Any, **options: Any) -> object:
        counts.append(len(collection))
        if len(counts) == 3:
            raise KeyboardInterrupt
        return _compute(model, collection, looks, **options)

    monkeypatch.setattr("nofuss.model.features.CHUNK", 10)
    monkeypatch.setattr("nofuss.model.features._compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_features(embedder, pictures)
    assert len(cached_features(embedder, pictures)) == 31
    assert counts == [10, 10, 10, 10]  # one of the last eleven is a copy


def test_pictures_that_can_not_be_decoded_are_reported_and_not_cached(
    cache: Path, pictures: Collection, embedder: Embedder
) -> None:
    expected = cached_features(embedder, pictures)
    for file in cache.glob("features-*.sqlite"):
        file.unlink()
    good = {row: pictures.paths[row].read_bytes() for row in (0, 17)}
    for row in good:
        pictures.paths[row].write_bytes(b"no picture")
    with pytest.raises(PictureError):
        cached_features(embedder, pictures)
    backbone = for_inference(embedder).backbone
    for _ in range(2):  # computed, then read
        found = features_of(backbone, pictures, skip_unreadable=True)
        assert found.unreadable.keys() == good.keys()
        assert found.unreadable[17].reason == "not a picture"
        assert pictures.paths[17].name in str(found.unreadable[17])
        readable = [i for i in range(len(pictures)) if i not in good]
        assert torch.equal(found.values[readable], expected[readable])
    for row, content in good.items():
        pictures.paths[row].write_bytes(content)
    assert torch.equal(cached_features(embedder, pictures), expected)


def test_what_features_were_computed_of_is_scanned(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan finds the same, copies too, and decodes only what could not be decoded."""
    photos = tmp_path / "photos"
    for number in range(8):
        (photos / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        scene(number, 300).save(photos / f"class {number % 2}" / f"{number}.jpg")
    shutil.copy(photos / "class 0" / "0.jpg", photos / "class 0" / "copy.jpg")
    scene(1, 260).save(photos / "class 1" / "smaller.jpg")
    (photos / "class 1" / "3.jpg").write_bytes(b"no picture")
    data = open_data(photos)
    expected, copies = scan_pictures(data), find_duplicates(data)
    assert len(copies.exact) == len(copies.near) == 1
    for file in cache.glob("scans-*"):
        file.unlink()
    backbone = build_embedder("convnet", channels=3).backbone
    backbone.preprocessing = Preprocessing(size=96, resize=96)  # decoded at another scale
    backbone.key = "test"
    found = features_of(backbone, data, skip_unreadable=True)
    assert report_on(data, found.unreadable) == expected
    decoded = list[str]()

    def counting(path: Path, **options: int) -> object:
        decoded.append(path.name)
        return decode(path, **options)

    monkeypatch.setattr("nofuss.data.scan.decode", counting)
    assert (scan_pictures(data), find_duplicates(data)) == (expected, copies)
    assert decoded == ["3.jpg", "3.jpg"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_the_pictures(
    cache: Path, pictures: Collection, embedder: Embedder, count: int
) -> None:
    """Of two batches one process of three has none; each learns what another could not read."""
    pictures.paths[20].write_bytes(b"no picture")
    backbone = for_inference(embedder).backbone
    expected = features_of(backbone, pictures, cached=False, skip_unreadable=True)

    def work() -> None:
        for _ in range(2):  # computed, then read
            found = features_of(backbone, pictures, skip_unreadable=True)
            assert torch.equal(found.values, expected.values)
            assert {row: str(error) for row, error in found.unreadable.items()} == reasons

    reasons = {row: str(error) for row, error in expected.unreadable.items()}
    assert reasons.keys() == {20}
    fork_together(count, work)


def test_vectors_are_their_own_features(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(7, 5))
    np.savez(tmp_path / "x.npz", vectors=vectors)
    embedder = build_embedder("identity", dim=4, channels=5)
    found = cached_features(embedder, open_data(tmp_path / "x.npz"))
    assert torch.equal(found, torch.from_numpy(vectors.astype(np.float32)))


def test_extraction_is_the_plain_loop(embedder: Embedder) -> None:
    embedder.freeze_batch_norm()
    backbone = embedder.train().backbone
    modes = [module.training for module in backbone.modules()]
    batches = [torch.randn(n, 3, 28, 28) for n in (5, 5, 2)]
    seen: list[int] = []
    features = extract(backbone, iter(batches), count=12, advance=seen.append)
    assert seen == [5, 10, 12]
    assert not features.requires_grad
    assert [module.training for module in backbone.modules()] == modes
    backbone.eval()
    assert torch.equal(features, torch.cat([backbone(batch) for batch in batches]))
