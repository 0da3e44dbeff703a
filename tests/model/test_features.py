"""Features of a fixed backbone: kept, and made again where the kept ones are damaged."""

from pathlib import Path

import pytest
import torch

from nofuss.config import Preprocessing
from nofuss.data import Collection, open_data
from nofuss.data.cache import write_tensor
from nofuss.model.embedder import Embedder, build_embedder
from nofuss.model.features import backbone_features
from tests.tiny_run import write_pictures


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path: Path) -> Collection:
    return open_data(write_pictures(tmp_path / "data"))


@pytest.fixture
def embedder() -> Embedder:
    return build_embedder("convnet", dim=4, channels=3)


SMALL = Preprocessing(size=16, resize=16)


def kept_in(cache: Path) -> Path:
    (file,) = cache.glob("features-*.safetensors")
    return file


def test_one_changed_bit_is_noticed(
    cache: Path, pictures: Collection, embedder: Embedder, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exponent that grows by a bit is a feature that rules every distance."""
    features = backbone_features(embedder, pictures, SMALL)
    file = kept_in(cache)
    whole = file.read_bytes()
    content = bytearray(whole)
    content[-1] ^= 0x40
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"features-\w+\.safetensors is damaged .* made again"):
        again = backbone_features(embedder, pictures, SMALL)
    assert torch.equal(again, features)
    assert file.read_bytes() == whole
    capsys.readouterr()
    assert torch.equal(backbone_features(embedder, pictures, SMALL), features)
    assert "computing features once" not in capsys.readouterr().out


def test_a_file_of_another_shape_does_not_stay(
    cache: Path, pictures: Collection, embedder: Embedder
) -> None:
    features = backbone_features(embedder, pictures, SMALL)
    file = kept_in(cache)
    other = file.with_name("other")
    write_tensor(other, torch.zeros(len(pictures), 5))
    other.replace(file)
    with pytest.warns(UserWarning, match=r"damaged \(torch.float32 \(31, 5\), not \(31, 256\)\)"):
        assert torch.equal(backbone_features(embedder, pictures, SMALL), features)
    assert torch.equal(backbone_features(embedder, pictures, SMALL), features)


def test_old_features_make_room_for_new_ones(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nofuss.data.cache.LIMIT", 100_000)  # those of 31 pictures take 32 KB
    for size in (12, 14, 16, 18):
        backbone_features(embedder, pictures, Preprocessing(size=size, resize=size))
        newest = max(cache.glob("features-*"), key=lambda file: file.stat().st_mtime_ns)
    files = list(cache.glob("features-*"))
    assert len(files) == 3
    assert newest in files
    assert sum(file.stat().st_size for file in files) <= 100_000 + 3 * 1000  # and their headers


def test_features_beyond_the_limit_are_not_kept(
    cache: Path, pictures: Collection, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nofuss.data.cache.LIMIT", 10_000)
    features = backbone_features(embedder, pictures, SMALL)
    assert not list(cache.glob("features-*"))
    assert torch.equal(backbone_features(embedder, pictures, SMALL), features)
