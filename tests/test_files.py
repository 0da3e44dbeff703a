"""Writes that appear whole or not at all."""

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nofuss.files import (
    _exchange,
    check_regular,
    check_seal,
    open_regular,
    read_json,
    seal,
    sha256,
    sync,
    write_file,
    write_folder,
    write_json,
)


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


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that can't swap two folders in one step."""
    monkeypatch.setattr("nofuss.files._exchange", lambda a, b: False)


@pytest.mark.usefixtures("without_exchange")
def test_a_folder_is_replaced_without_exchange_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with write_folder(tmp_path / "run") as new:
            (new / name).write_text(name)
    assert contents(tmp_path) == {"run/b": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    """What such a kill leaves where folders can't be swapped: the next write puts it back first."""
    (tmp_path / ".run.old").mkdir()
    (tmp_path / ".run.old" / "a").write_text("old")

    def fail() -> None:
        with write_folder(tmp_path / "run"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert contents(tmp_path) == {"run/a": "old"}


def test_a_reader_always_finds_a_folder(tmp_path: Path) -> None:
    """While another thread replaces it again and again."""
    if not _can_exchange(tmp_path):
        pytest.skip("this file system can't swap two folders")
    with write_folder(tmp_path / "run") as new:
        (new / "a").write_text("0")
    done = threading.Event()

    def replace() -> None:
        for i in range(100):
            with write_folder(tmp_path / "run") as new:
                (new / "a").write_text(str(i))
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        assert (tmp_path / "run").is_dir()
    writer.join()


def _can_exchange(folder: Path) -> bool:
    for name in ("x", "y"):
        (folder / name).mkdir()
    return _exchange(folder / "x", folder / "y")


@pytest.mark.usefixtures("without_exchange")
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


def test_every_flipped_bit_of_a_json_file_is_noticed_or_harmless(tmp_path: Path) -> None:
    content = {"loss": "proxy-nca", "dim": 64, "rate": 1e-3, "names": ["ü", "\udcff"], "x": None}
    file = tmp_path / "config.json"
    write_json(file, content)
    assert read_json(file) == content
    whole = file.read_bytes()
    noticed = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            found = read_json(file)
        except ValueError:
            noticed += 1
        else:  # white space, or the word "checksum" itself
            assert {k: found[k] for k in content} == content
    assert noticed > 6 * len(whole)


def test_json_of_other_programs_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": 1}')
    assert read_json(tmp_path / "x") == {"a": 1}
    (tmp_path / "x").write_text("[1]")
    with pytest.raises(ValueError, match="not an object"):
        read_json(tmp_path / "x")


@pytest.mark.parametrize("content", ["", "[]", "{}x", '{"a": "0"}', '{"none": "0"}'])
def test_a_seal_that_does_not_fit(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text("1")
    seal(tmp_path)
    check_seal(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"a": sha256(tmp_path / "a")}
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises((ValueError, FileNotFoundError)):
        check_seal(tmp_path)


def test_checksum(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc" * 100_000)
    assert sha256(file) == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_sync_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


# Files that are no files: opened or refused at once, and never waited for.


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a named pipe": fifo,
    "a socket": listening,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "1,099,511,627,776 bytes, more than": sparse,
}


@pytest.mark.skipif(os.name == "nt", reason="has neither pipes nor sockets by name")
@pytest.mark.parametrize("said", NO_FILES)
def test_what_is_no_file_is_not_read(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    NO_FILES[said](Path("x"))
    for look in (open_regular, check_regular):
        with pytest.raises(OSError, match=said):
            look(Path("x"))


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"abc"
    with open_regular(tmp_path / "x", limit=3) as file:
        assert file.seek(1) == 1
        assert file.read() == b"bc"
    with pytest.raises(OSError, match="3 bytes, more than the 2"):
        open_regular(tmp_path / "x", limit=2)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc")
def test_files_without_a_size_are_empty() -> None:
    """Reading them would fail, never end, or wait for the kernel to say something."""
    for name in ("mem", "pagemap", "environ"):
        with open_regular(Path("/proc/self") / name) as file:
            assert file.read() == b""


def test_a_pipe_that_takes_the_name_of_a_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at it and the opening."""
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("nofuss.files.check_regular", lambda path, limit: 1)
    with pytest.raises(OSError, match="a named pipe"):
        open_regular(tmp_path / "pipe")
