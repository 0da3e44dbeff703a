"""Files of ours: written whole or not at all, read only if regular, one writer at a time."""

import csv
import errno
import hashlib
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nofuss import files
from nofuss.errors import RunError
from nofuss.files import (
    LOCK,
    OWNER,
    TEMPORARY,
    append_lines,
    check_regular,
    csv_cell,
    csv_text,
    digest,
    load_tensors,
    locked,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    sha256,
    tensor_bytes,
    tensor_parts,
    write_by_content,
    write_file,
    write_json,
)

# ---- writing


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / ("naïve name " + "x" * 230)  # as long as a name may be
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


def test_an_error_after_the_rename_is_not_an_error_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is in force: a caller that heard of an error would say the opposite."""

    fsync = os.fsync

    def failing_on_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing_on_folders)
    write_file(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"


def test_a_file_named_by_its_content(tmp_path: Path) -> None:
    checksum = write_by_content(tmp_path, "weights", "bin", b"abc")
    assert checksum == hashlib.sha256(b"abc").hexdigest()
    file = tmp_path / f"weights-{checksum[:16]}.bin"
    before = file.stat()
    write_by_content(tmp_path, "weights", "bin", b"abc")
    assert file.stat().st_ino == before.st_ino  # it was there, and whole
    file.write_bytes(b"abd")
    write_by_content(tmp_path, "weights", "bin", b"abc")
    assert file.read_bytes() == b"abc"


def test_lines_are_added_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "JSON_LIMIT", 30)
    file = tmp_path / "x"
    assert read_lines(file) == []
    append_lines(file, ['"one"', '"two"'])
    with file.open("ab") as opened:
        opened.write(b'"thr')
    assert read_lines(file) == ["one", "two"]
    append_lines(file, ['"four"'])
    assert read_lines(file) == ["one", "two", None, "four"]
    before = file.read_bytes()
    with pytest.raises(OSError, match="more than the limit of 30 bytes"):
        append_lines(file, ['"five"'])
    assert file.read_bytes() == before


# ---- JSON, tables, tensors, checksums


def test_brackets_without_end_are_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b"[" * 200_000)


def test_numbers_that_overflow_are_no_json_of_ours() -> None:
    assert parse_json(b"[18446744073709551615, -9223372036854775808]")[0] == 2**64 - 1
    with pytest.raises(ValueError, match="too large"):
        parse_json(b"[1" + b"0" * 400 + b"]")


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


def test_a_description_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(OSError, match="more than the limit"):
        read_json(tmp_path / "config.json")


CELLS = [
    "plain",
    '=HYPERLINK("http://x")',
    "+1",
    "-10",
    "@SUM(A1)",
    "\tx",
    "\rx",
    "'=x",
    "''-",
    "'",
]


@pytest.mark.parametrize("text", CELLS)
def test_a_table_for_people_holds_text_and_no_formula(text: str) -> None:
    [row] = csv.reader(io.StringIO(csv_text([(text, "a,b", -1.5)]), newline=""))
    assert row[0][0] not in "=+-@\t\r"
    assert csv_cell(row[0]) == text
    assert row[1:] == ["a,b", "-1.5"]  # a number is none
    assert csv_cell(text) == text or text.startswith("'")


def test_tensors_come_back(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": shared, "b": shared, "c": shared.T, "n": np.arange(3)}
    content = tensor_bytes(tensors, {"scale": 2.5})
    write_file(tmp_path / "x", content)
    found, about = load_tensors(tmp_path / "x")
    assert about == {"scale": 2.5}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], torch.as_tensor(t)) for name, t in tensors.items())
    assert content == tensor_bytes(tensors, {"scale": 2.5})  # equal runs have equal bytes
    (tmp_path / "x").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"."):
        load_tensors(tmp_path / "x")


def test_checksums(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert sha256(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
    assert digest(b"ab", memoryview(b"c")) == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    tensor = torch.arange(6.0).reshape(2, 3)
    turned = digest(*tensor_parts({"w": tensor.T}))
    assert turned == digest(b"w", np.ascontiguousarray(tensor.numpy().T).tobytes())


# ---- files that are no files: opened or refused at once, and never waited for


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": fifo,
    "socket": listening,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "large": sparse,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_not_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    NO_FILES[kind](Path("x"))
    for look in (check_regular, read_bytes):
        with pytest.raises(OSError, match=r"not a regular file|more than the limit") as caught:
            look(Path("x"))
        assert caught.value.filename == "x"


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_bytes(tmp_path / "link", limit=3) == b"abc"
    with pytest.raises(OSError, match="3 bytes, more than the limit of 2"):
        read_bytes(tmp_path / "x", limit=2)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no /proc")
def test_files_without_a_size_are_empty() -> None:
    """Reading them would fail, never end, or wait for the kernel to say something."""
    for name in ("mem", "pagemap", "environ"):
        assert read_bytes(Path("/proc/self") / name) == b""


# ---- one writer: real processes, real kills

HOLD = """
import sys
from pathlib import Path
from nofuss.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(run: Path) -> "subprocess.Popen[str]":
    """Another process that has locked the run until its input ends."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def take(run: Path) -> None:
    with locked(run):
        assert (run / OWNER).is_file()


def test_a_lock_is_taken_and_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        take(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} <= {LOCK}
    with pytest.raises(ValueError, match="inside"), locked(tmp_path):
        raise ValueError("inside")
    take(tmp_path)


@pytest.mark.slow
def test_the_second_is_told_who_is_first(tmp_path: Path) -> None:
    began = time.strftime("%Y-%m-%d")
    other = hold(tmp_path)
    match = rf"is being written by process {other.pid} \('nofuss .*', since {began} \d\d:\d\d"
    for _ in range(2):
        with pytest.raises(RunError, match=match):
            take(tmp_path)
    other.communicate("")
    assert other.returncode == 0
    take(tmp_path)


def test_two_threads_of_one_process(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(RunError, match=f"by process {os.getpid()} "):
            take(tmp_path)
        assert (tmp_path / OWNER).is_file()


@pytest.mark.slow
def test_a_killed_one_holds_nobody_up_and_its_remains_are_deleted(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    (tmp_path / "model").mkdir()
    for folder in (tmp_path, tmp_path / "model"):
        (folder / f"{TEMPORARY}0123456789abcdef").write_text("half")
    take(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} <= {LOCK, "model"}
    assert not list((tmp_path / "model").iterdir())
