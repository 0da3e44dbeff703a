import os
from pathlib import Path

import pytest

from nofuss.data.cache import cache_directory, write_atomically


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
    assert write_atomically(file, lambda f: f.write(b"old"))

    def full_disk(f: object) -> None:
        raise OSError(28, "No space left on device")

    assert not write_atomically(file, full_disk)
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == ["file"]


def test_a_place_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not write_atomically(tmp_path / "file" / "below", lambda f: f.write(b"new"))
