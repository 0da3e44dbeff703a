"""Writes that appear whole or not at all."""

import hashlib
from pathlib import Path

import pytest

from nofuss.files import sha256, sync, write_file, write_folder


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "naïve name.json"
    write_file(file, "old")
    write_file(file, "nü")
    assert file.read_bytes() == "nü".encode()
    write_file(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """The target is a folder, so that the last step fails."""
    (tmp_path / "x" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_file(tmp_path / "x", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_folder_appears_when_all_went_well(tmp_path: Path) -> None:
    with write_folder(tmp_path / "deep" / "run") as new:
        (new / "a").write_text("1")
        assert not (tmp_path / "deep" / "run").exists()
    assert contents(tmp_path) == {"deep/run/a": "1"}


def test_a_folder_takes_the_old_ones_place_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with write_folder(tmp_path / "run") as new:
            (new / name).write_text(name)
    assert contents(tmp_path) == {"run/b": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_failure_half_way_leaves_the_old_folder(tmp_path: Path) -> None:
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("old")

    def fail() -> None:
        with write_folder(tmp_path / "run") as new:
            (new / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_failure_at_the_last_step_puts_the_old_folder_back(tmp_path: Path) -> None:
    """The new folder is gone when it is to be renamed, as on a disk that fails."""
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("old")

    class Vanishing(type(tmp_path)):  # type: ignore[misc]
        def rename(self, target: Path) -> Path:
            if self.name == ".run.new":
                raise OSError(5, "Input/output error")
            return Path(self).rename(target)

    def fail() -> None:
        with write_folder(Vanishing(tmp_path / "run")) as new:
            (new / "a").write_text("new")

    with pytest.raises(OSError, match="Input/output error"):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}


def test_remains_of_a_kill_are_no_obstacle(tmp_path: Path) -> None:
    for remains in (".run.new", ".run.old"):
        (tmp_path / remains).mkdir()
        (tmp_path / remains / "rest").write_text("x")
    with write_folder(tmp_path / "run") as new:
        assert not list(new.iterdir())
        (new / "a").write_text("1")
    assert (tmp_path / "run" / "a").read_text() == "1"
    assert not (tmp_path / ".run.new").exists()


def test_checksum(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc" * 100_000)
    assert sha256(file) == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_sync_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")
