"""Writes that appear whole or not at all."""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nofuss.files.atomic import (
    check_regular,
    check_seal,
    open_regular,
    parse_json,
    read_json,
    seal,
    sha256,
    sync,
    write_file,
    write_json,
)


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


def test_nothing_that_lies_in_the_folder_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links at the target and at the temporary name, even where that could be foreseen."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "scores.json").symlink_to(tmp_path / "precious")
    write_file(tmp_path / "run" / "scores.json", "new")
    assert (tmp_path / "run" / "scores.json").read_text() == "new"
    monkeypatch.setattr("nofuss.files.atomic.temporary_name", lambda name: ".foreseen")
    (tmp_path / "run" / ".foreseen").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "run" / "scores.json", "newer")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "run" / "scores.json").is_symlink()


def test_brackets_without_end_are_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b"[" * 200_000)


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
    with pytest.raises(OSError, match="3 bytes, more than the limit of 2"):
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
    monkeypatch.setattr("nofuss.files.atomic.check_regular", lambda path, limit: 1)
    with pytest.raises(OSError, match="a named pipe"):
        open_regular(tmp_path / "pipe")
