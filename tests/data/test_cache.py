import os
import time
from pathlib import Path

import pytest

from nofuss.data.cache import (
    cache_directory,
    make_room,
    mark_used,
    try_write,
)
from nofuss.files import TEMPORARY


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", "own")
    monkeypatch.setenv("XDG_CACHE_HOME", "shared")
    assert cache_directory() == Path("own")
    monkeypatch.delenv("NOFUSS_CACHE")
    assert cache_directory() == Path("shared/nofuss")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "nofuss"


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    file = tmp_path / "below" / "file"
    assert try_write(file, lambda f: f.write(b"old"))

    def full_disk(f: object) -> None:
        raise OSError(28, "No space left on device")

    assert not try_write(file, full_disk)
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == ["file"]


def test_a_place_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not try_write(tmp_path / "file" / "below", lambda f: f.write(b"new"))


def test_what_killed_writers_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"{TEMPORARY}{i}" for i in range(3))
    for file in (old, new, tmp_path / ".x.new"):
        file.touch()
    other.mkdir()
    for file in (old, other, tmp_path / ".x.new"):
        os.utime(file, (0, time.time() - 2 * 24 * 3600))
    assert try_write(tmp_path / "file", lambda f: f.write(b"new"))
    left = {".x.new", "file", new.name, other.name}
    assert {path.name for path in tmp_path.iterdir()} == left


# Room for features


def kept_file(cache: Path, number: int, size: int, *, used: float) -> Path:
    file = cache / f"features-{number:032x}.sqlite"
    file.write_bytes(bytes(size))
    os.utime(file, (used, used))
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path))
    return tmp_path


def test_the_longest_unused_features_make_room(cache: Path) -> None:
    first, second, third = (kept_file(cache, i, 100, used=i) for i in (1, 2, 3))
    assert make_room(100, limit=400)
    assert len(os.listdir(cache)) == 3
    mark_used(first)
    assert make_room(100, limit=399)
    assert sorted(cache.iterdir()) == [first, third]
    graph = cache / f"backbone-{0:032x}.onnx"
    graph.write_bytes(bytes(100))
    assert make_room(300, limit=400)  # graphs count as well
    assert list(cache.iterdir()) == [graph]
    assert not second.exists()


def test_features_of_earlier_versions_make_room(cache: Path) -> None:
    """They were safetensors, which nothing reads any more."""
    old = cache / f"features-{1:032x}.safetensors"
    old.write_bytes(bytes(100))
    assert make_room(100, limit=150)
    assert not old.exists()


def test_what_is_larger_than_the_limit_drives_nothing_out(cache: Path) -> None:
    kept = kept_file(cache, 1, 100, used=1)
    assert not make_room(500, limit=400)
    assert kept.exists()


def test_room_is_made_of_our_files_only(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other names, folders and links stay, whatever their size and age."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "thesis"
    elsewhere.write_bytes(bytes(1000))
    (cache / f"features-{1:032x}.sqlite").symlink_to(elsewhere)
    (cache / f"features-{2:032x}.sqlite").mkdir()
    others = ["features-mine.sqlite", f"features-{3:032x}.sqlite.bak", "thesis"]
    others += [f"my-features-{3:032x}.sqlite", f"characters-{3:016x}.npz"]
    for name in others:
        (cache / name).write_bytes(bytes(1000))
        os.utime(cache / name, (0, 0))
    before = sorted(os.listdir(cache))
    ours = kept_file(cache, 4, 100, used=1)
    assert make_room(100, limit=100)
    assert sorted(os.listdir(cache)) == before
    assert not ours.exists()
    assert elsewhere.stat().st_size == 1000


def test_room_in_a_cache_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", "/nowhere/at/all")
    assert make_room(100)
    mark_used(cache_directory() / "features")
