"""The cache: right or empty, whatever happened to its files; one limit; its owner's alone."""

import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss import cache as caching
from nofuss.cache import (
    Records,
    Rows,
    blob,
    cache_directory,
    digests,
    holds_blob,
    key_of,
    make_room,
    name_of,
    room,
)
from nofuss.config import Preprocessing
from nofuss.data.decode import decode_resized
from nofuss.data.transforms import center_views
from nofuss.files import array_bytes, digest
from torture.bombs import saved

NAME, OTHER = f"features-{7:032x}", f"graph-{8:032x}"
KEYS = [key_of(b"%d" % i) for i in range(60)]
VALUES = [np.random.default_rng(i).random(40, np.float32).tobytes() for i in range(60)]

pytestmark = pytest.mark.usefixtures("cache")


@contextmanager
def flipped(file: Path, seed: int) -> Iterator[None]:
    """Flip one bit of a file, and restore it afterwards."""
    whole, draw = file.read_bytes(), random.Random(seed)
    content = bytearray(whole)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    yield
    file.write_bytes(whole)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", "own")
    monkeypatch.setenv("XDG_CACHE_HOME", "shared")
    assert cache_directory() == Path("own")
    monkeypatch.delenv("NOFUSS_CACHE")
    assert cache_directory() == Path("shared/nofuss")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "nofuss"


def test_only_the_owner_can_read_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = cache / "new"
    monkeypatch.setenv("NOFUSS_CACHE", str(home))
    Rows(NAME).write(KEYS, VALUES)
    blob(OTHER, lambda: b"graph")
    Records(NAME, (3,), 5)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    files = [file for file in home.iterdir() if file.name != "CACHEDIR.TAG"]
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_what_is_cached_is_what_this_code_computes() -> None:
    """Raise `cache.VERSION` together with this digest where the code is to give other pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 131, 4), dtype=np.uint8)
    content = saved(Image.fromarray(noise), "PNG")
    fit = Preprocessing(size=24, resize=32)
    colour, gray = (decode_resized(content, replace(fit, mode=mode)) for mode in ("RGB", "L"))
    views = center_views([colour], fit).contiguous().numpy()
    made = digest(caching.VERSION, *map(array_bytes, (colour, gray, views)))
    assert made == "a887e71ed73d1148dec3b5a0b6a38a6e"
    assert name_of("features", b"x") == f"features-{digest(caching.VERSION, b'x')}"


# Rows


def test_values_come_back_by_key() -> None:
    rows = Rows(NAME)
    assert dict(rows.read(KEYS)) == {}
    rows.write(KEYS[:50], VALUES[:50])
    found = dict(rows.read([KEYS[3], b"", KEYS[55], KEYS[3], KEYS[7]]))
    assert found == {KEYS[3]: VALUES[3], KEYS[7]: VALUES[7]}
    rows.write(KEYS[40:], VALUES[40:])
    assert dict(rows.read(KEYS)) == dict(zip(KEYS, VALUES, strict=True))


def test_no_flipped_bit_of_rows_gives_a_wrong_value() -> None:
    rows, expected = Rows(NAME), dict(zip(KEYS, VALUES, strict=True))
    rows.write(KEYS, VALUES)
    made_again = 0
    for seed in range(400):
        with flipped(rows.file, seed):
            found = dict(rows.read(KEYS))
            assert found.items() <= expected.items()
            made_again += len(found) < len(KEYS)
    assert made_again > 50  # the flips do hit values
    assert dict(rows.read(KEYS)) == expected


@pytest.mark.parametrize("content", [b"", b"no database at all" * 500])
def test_a_file_that_is_no_database_does_not_stay(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(NAME)
    rows.write(KEYS, VALUES)
    rows.file.write_bytes(content)
    assert dict(rows.read(KEYS)) == {}
    assert ("is damaged" in caplog.text) == bool(content)
    rows.write(KEYS, VALUES)
    assert len(dict(rows.read(KEYS))) == len(KEYS)


@pytest.mark.parametrize("change", ["CREATE TABL\xff", "CREATE TABLE xows"])
def test_another_schema_does_not_stay(change: str) -> None:
    rows = Rows(NAME)
    rows.write(KEYS, VALUES)
    content, new = rows.file.read_bytes(), change.encode("latin-1")
    rows.file.write_bytes(content.replace(b"CREATE TABLE rows"[: len(new)], new))
    assert dict(rows.read(KEYS)) == {}
    for _ in range(2):
        rows.write(KEYS, VALUES)
    assert len(dict(rows.read(KEYS))) == len(KEYS)


def test_reading_counts_as_use() -> None:
    rows = Rows(NAME)
    rows.write(KEYS, VALUES)
    os.utime(rows.file, (1, 1))
    assert dict(rows.read(KEYS[:1]))
    assert rows.file.stat().st_mtime > time.time() - 60


@pytest.mark.slow
def test_two_processes_write_at_once(cache: Path) -> None:
    """Both sets are there afterwards."""
    script = (
        "import sys; from nofuss.cache import Rows; n = int(sys.argv[2]); rows = Rows(sys.argv[1]);"
        "[rows.write([bytes([n, i])], [bytes([i])]) for i in range(50)]"
    )
    words = [[sys.executable, "-c", script, NAME, str(n)] for n in (1, 2)]
    writers = [subprocess.Popen(each) for each in words]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    keys = [bytes([n, i]) for n in (1, 2) for i in range(50)]
    assert dict(Rows(NAME).read(keys)) == {key: key[1:] for key in keys}


# Digests


def contents(paths: Sequence[Path], read: list[Path]) -> list[bytes]:
    def reading(path: Path) -> bytes:
        read.append(path)
        return path.read_bytes()

    return digests(paths, reading)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files that count as settled."""
    monkeypatch.setattr(caching, "FRESH_NS", -(10**12))
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]) * 100)
    return [tmp_path / f"{i}.bin" for i in range(3)]


def test_only_what_may_have_changed_is_read(files: list[Path], tmp_path: Path) -> None:
    read: list[Path] = []
    first = contents(files, read)
    assert first == [key_of(file.read_bytes()) for file in files]
    assert sorted(read) == files
    assert contents(files, read) == first
    assert len(read) == 3
    shutil.copy2(files[0], tmp_path / "copy.bin")
    assert contents([tmp_path / "copy.bin"], read) == first[:1]
    missing = tmp_path / "none.bin"
    assert contents([missing, files[1]], read) == [b"", first[1]]


def test_an_exchanged_file_is_noticed_though_its_time_is_kept(files: list[Path]) -> None:
    before, status = contents(files, []), files[1].stat()
    other = files[1].with_suffix(".new")
    other.write_bytes(b"x" * status.st_size)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(files[1])
    assert contents(files, [])[1] != before[1]
    files[2].write_bytes(b"y" * status.st_size)  # in place, with its time set back
    os.utime(files[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    now = contents(files, [])
    assert now == [key_of(file.read_bytes()) for file in files]


def test_a_file_that_has_just_changed_is_read_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the resolution of its times it could change once more."""
    monkeypatch.setattr(caching, "FRESH_NS", 10**12)
    read: list[Path] = []
    for _ in range(2):
        contents(files, read)
    assert len(read) == 6


# Records

ROWS = np.array([3, 0, 17])


def arrays(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.stack([np.random.default_rng(int(i)).random((3, 4)) for i in numbers]).astype("f2")


@pytest.mark.parametrize("reserves", [True, False], ids=["Linux", "macOS"])
def test_records_come_back_by_number(reserves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    records = Records(NAME, (3, 4), 20)
    assert records.read(ROWS) is None
    records.write(ROWS, arrays(ROWS))
    for opened in (records, Records(NAME, (3, 4), 20)):
        found = opened.read(ROWS[::-1])
        assert found is not None
        assert (found == arrays(ROWS[::-1])).all()
        assert opened.read(np.array([3, 4])) is None


def test_no_flipped_bit_of_records_gives_a_wrong_value(cache: Path) -> None:
    every = np.arange(20)
    Records(NAME, (3, 4), 20).write(every, arrays(every))
    damaged = 0
    for seed in range(300):
        with flipped(cache / f"{NAME}.records", seed):
            records = Records(NAME, (3, 4), 20)
            for number in range(20):
                found = records.read(np.array([number]))
                assert found is None or (found == arrays([number])).all()
                damaged += found is None
    assert damaged == 300


def test_a_record_in_another_s_place_is_noticed(cache: Path) -> None:
    records = Records(NAME, (3, 4), 20)
    records.write(ROWS, arrays(ROWS))
    file, size = cache / f"{NAME}.records", Records.kind_of((3, 4)).itemsize
    content = bytearray(file.read_bytes())
    content[5 * size : 6 * size] = content[3 * size : 4 * size]
    file.write_bytes(content)
    opened = Records(NAME, (3, 4), 20)
    assert opened.read(np.array([5])) is None
    assert opened.read(ROWS) is not None
    other = f"activations-{8:032x}"  # the file of another key under this name
    shutil.copy(file, cache / f"{other}.records")
    assert Records(other, (3, 4), 20).read(ROWS) is None


# Single values


def test_a_value_is_made_once(cache: Path) -> None:
    assert not holds_blob(NAME)
    assert blob(NAME, lambda: b"graph") == b"graph" == blob(NAME, lambda: b"other")
    assert holds_blob(NAME)
    shutil.copy(cache / f"{NAME}.sqlite", cache / f"{OTHER}.sqlite")  # of another key
    assert blob(OTHER, lambda: b"another") == b"another"


def test_no_flipped_bit_of_a_value_gives_a_wrong_one(cache: Path) -> None:
    value, again = random.Random(0).randbytes(50_000), 0
    blob(NAME, lambda: value)
    for seed in range(200):
        with flipped(cache / f"{NAME}.sqlite", seed):
            found = blob(NAME, lambda: b"made again")
            assert found in (value, b"made again")
            again += found != value
    assert again > 50


def test_a_value_that_can_not_be_made_leaves_nothing(cache: Path) -> None:
    def failing() -> bytes:
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        blob(NAME, failing)
    assert list(cache.iterdir()) == []


def test_a_value_too_large_for_sqlite_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "LARGEST_ROW", 5)
    assert blob(NAME, lambda: b"a graph") == b"a graph" != blob(NAME, lambda: b"made again")


# Room


def kept_file(cache: Path, number: int, size: int, *, used: float) -> Path:
    file = cache / f"features-{number:032x}.sqlite"
    file.write_bytes(bytes(size))
    os.utime(file, (used, used))
    return file


def test_the_longest_unused_make_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, third = (kept_file(cache, i, 100, used=i) for i in (1, 2, 3))
    monkeypatch.setattr(caching, "LIMIT", 400)
    assert make_room(100)
    assert len(os.listdir(cache)) == 3
    os.utime(first)
    monkeypatch.setattr(caching, "LIMIT", 399)
    assert make_room(100)
    assert sorted(cache.iterdir()) == [first, third]
    journal = Path(f"{third}-journal")
    journal.touch()
    assert make_room(100, keep=first)
    assert make_room(250)
    assert not third.exists()
    assert not journal.exists()


def test_what_is_larger_than_the_limit_drives_nothing_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_file(cache, 1, 100, used=1)
    monkeypatch.setattr(caching, "LIMIT", 400)
    assert not make_room(500)
    assert kept.exists()


def test_room_is_made_of_our_files_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names stay, whatever their size and age."""
    others = ["features-mine.sqlite", f"features-{3:032x}.sqlite.bak", "thesis"]
    others += [f"my-features-{3:032x}.sqlite", f"characters-{3:016x}.npz"]
    for name in others:
        (cache / name).write_bytes(bytes(1000))
        os.utime(cache / name, (0, 0))
    before = sorted(os.listdir(cache))
    ours = kept_file(cache, 4, 100, used=1)
    monkeypatch.setattr(caching, "LIMIT", 100)
    assert make_room(100)
    assert sorted(os.listdir(cache)) == before
    assert not ours.exists()


# A cache that can't be used


@pytest.mark.parametrize("place", ["file/cache", f"{'x' * 300}/cache"])
def test_a_place_that_can_not_be_written_costs_time_only(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / place))
    assert room() > 0
    assert make_room(100)
    Rows(NAME).write(KEYS, VALUES)
    assert dict(Rows(NAME).read(KEYS)) == {}
    assert not holds_blob(NAME)
    assert blob(NAME, lambda: b"made") == b"made"
    assert digests([tmp_path / "file"], Path.read_bytes) == [key_of(b"")]
    with pytest.raises(OSError, match=r"Not a directory|name too long"):
        Records(NAME, (3,), 5)


@pytest.mark.slow
def test_a_full_disk_costs_time_only(cache: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    script = """
import resource, signal, sys
from tests.test_cache import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
Rows(NAME).write(KEYS, VALUES)
assert dict(Rows(NAME).read(KEYS)) == {}
assert blob(OTHER, lambda: bytes(5000)) == bytes(5000)
try:
    Records(NAME, (30, 40), 20)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"
    assert not list(cache.glob("*.records"))


def test_a_file_that_grows_may_use_its_own_room(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts once: what it takes already, and 80% of what is free."""
    Records(NAME, (3, 4), 100)
    file = cache / f"{NAME}.records"
    size = file.stat().st_size
    free = shutil._ntuple_diskusage(10**9, 0, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert room() == size + 800
    assert not make_room(size + 801, keep=file)
    assert make_room(size + 800, keep=file)
