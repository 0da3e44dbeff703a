import os
import time
import warnings
from pathlib import Path

import pytest
import torch

from nofuss.data.cache import cache_directory, read_tensor, write_atomically, write_tensor
from nofuss.files.atomic import temporary_name


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


def test_what_killed_writers_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new, other = (tmp_path / temporary_name("x") for _ in range(3))
    for file in (old, new, tmp_path / ".x.new"):
        file.touch()
    other.mkdir()
    for file in (old, other, tmp_path / ".x.new"):
        os.utime(file, (0, time.time() - 2 * 24 * 3600))
    assert write_atomically(tmp_path / "file", lambda f: f.write(b"new"))
    left = {".x.new", "file", new.name, other.name}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_every_changed_bit_of_a_tensor_is_noticed(tmp_path: Path) -> None:
    """Or it is in the padding of the header, and the tensor is the same."""
    file, kept = tmp_path / "features", torch.arange(6.0).reshape(2, 3)
    like = torch.empty(2, 3, device="meta")
    assert read_tensor(file, like=like) is None
    assert write_tensor(file, kept)
    whole = file.read_bytes()
    noticed = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = read_tensor(file, like=like)
        noticed += len(said)
        assert (found is None) == bool(said)
        assert found is None or torch.equal(found, kept)
    assert noticed > 7 * len(whole)


@pytest.mark.parametrize("other", [torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(2, 3).half()])
def test_a_tensor_of_another_shape_is_made_again(other: torch.Tensor, tmp_path: Path) -> None:
    write_tensor(tmp_path / "features", other)
    with pytest.warns(UserWarning, match=r"features is damaged \(torch.float\d\d \(.*\), not"):
        assert read_tensor(tmp_path / "features", like=torch.empty(2, 3)) is None
