"""The cache: digests of files, features, activations, exported graphs, drawn characters.

    <cache>/digests-KEY.sqlite        path, size, times and inode of a file → digest of its content
    <cache>/features-KEY.sqlite       features of one backbone, by the content of the picture
    <cache>/scans-KEY.sqlite          which contents can be decoded, and how they look
    <cache>/speeds-KEY.sqlite         name of a network → pictures a second on this machine
    <cache>/graph-KEY.sqlite          one value: a backbone's graph for onnxruntime
    <cache>/characters-KEY.sqlite, <cache>/han-KEY.sqlite
    <cache>/activations-KEY.records   arrays of one shape in a memory map

Everything here can be made again. A KEY is a digest of all that values depend on, our own code
included; pictures count by their content, so that a folder can be moved or copied. Every value has
a checksum over its key *and* its bytes: what a failing disk has changed, or put in another's place,
is made again. All files have one limit together; the ones that were not used for the longest time
are deleted first. Only their owner can read them. A cache that can't be written makes commands
slower, never wrong.
"""

import errno
import logging
import os
import re
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.errors import one_line
from nofuss.files import Bytes, digest

log = logging.getLogger("nofuss")
VERSION = b"1"
"""To be raised where our code computes other values than before from the same inputs."""
LIMIT = 24 * 2**30
"""Bytes that all files of the cache may take together."""
FREE_FRACTION = 0.8
"""Fraction of the free disk that the cache may take."""
FRESH_NS = 2 * 10**9
"""A file that changed less than this ago may change again within the resolution of its times."""
WAIT_SECONDS = 30.0
"""How long to wait for another process that writes."""
LARGEST_ROW = 10**9
"""Most bytes of a value in SQLite."""
_OURS = re.compile(r"[a-z]+-[0-9a-f]{32}\.(?:sqlite|records)")
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# The cache of nofuss; delete it at any time.\n"
)
_AT_ONCE = 500  # keys in one query; SQLite allows 999 parameters at least
_PIECE = 16  # files that a thread hashes at once: one at a time, small files wait for Python's lock


def cache_directory() -> Path:
    """Return $NOFUSS_CACHE, else $XDG_CACHE_HOME/nofuss, else ~/.cache/nofuss."""
    if directory := os.environ.get("NOFUSS_CACHE"):
        return Path(directory)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nofuss"


def name_of(kind: str, *made_of: Bytes) -> str:
    """Return the name of a file: what it holds, and a digest of all that its values depend on."""
    return f"{kind}-{digest(VERSION, *made_of)}"


def key_of(*parts: Bytes) -> bytes:
    """Return the digest of the parts, one after the other."""
    return bytes.fromhex(digest(*parts))


def room() -> int:
    """Return the bytes that one file may take if all others of the cache are deleted."""
    folder = cache_directory().absolute()
    place = next(path for path in (folder, *folder.parents) if os.path.isdir(path))
    sizes = sum(size for _, size, _ in _files())
    return int(min(LIMIT, FREE_FRACTION * shutil.disk_usage(place).free + sizes))


def make_room(needed: int, *, keep: Path | None = None) -> bool:
    """Delete files, longest unused first, until `needed` bytes fit; False if they never do.

    keep: the file that is to hold the `needed` bytes, not counted and not deleted either.
    """
    left = room() - needed
    if left < 0:
        return False
    total = 0
    for _, size, path in sorted(_files(), reverse=True):  # the last used come first, and stay
        total += size if path != keep else 0
        if total > left and path != keep:
            _delete(path)
    return True


def _files() -> list[tuple[float, int, Path]]:
    """Return time, size and path of each file of ours."""
    found = []
    with suppress(OSError):
        for path in cache_directory().iterdir():
            if _OURS.fullmatch(path.name):
                with suppress(OSError):  # another process has just deleted it
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
    return found


def _size(path: Path) -> int:
    # os.path: pathlib raises where a folder can't be entered, or a name is too long.
    return path.stat().st_size if os.path.exists(path) else 0


def _use(file: Path) -> None:
    """Make a file for its owner alone if it is not there, and note that it is used now."""
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True, mode=0o700)
        (file.parent / "CACHEDIR.TAG").write_text(_TAG)  # so that backup programs leave it out
    file.touch(mode=0o600)


def _delete(path: Path) -> None:
    for name in (path, Path(f"{path}-journal")):  # of SQLite
        with suppress(OSError):
            name.unlink()


def _checksum(key: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key))


# Values by key


class Rows:
    """Values by key, in one file of SQLite."""

    def __init__(self, name: str) -> None:
        self.file = cache_directory() / f"{name}.sqlite"

    def read(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each key that is known; an empty key never is."""
        wanted, damaged = {key for key in keys if key}, 0
        unique = sorted(wanted)
        if not unique or not os.path.exists(self.file):
            return
        with self._failing_softly(), closing(self._connect()) as database:
            for start in range(0, len(unique), _AT_ONCE):
                part = unique[start : start + _AT_ONCE]
                marks = ",".join("?" * len(part))
                query = f"SELECT key, value, checksum FROM rows WHERE key IN ({marks})"
                for key, value, checksum in database.execute(query, part):
                    is_value = isinstance(value, bytes) and key in wanted
                    if is_value and _checksum(key, value) == checksum:
                        yield key, value
                    else:
                        damaged += 1
        if damaged:
            self._warn(f"{damaged:,} values have another checksum")

    def write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write values, all or none of them: none if the disk is full."""
        rows = [
            (key, value, _checksum(key, value))
            for key, value in zip(keys, values, strict=True)
            if key and len(value) < LARGEST_ROW
        ]
        needed = _size(self.file) + sum(3 * len(value) // 2 + 64 for _, value, _ in rows)
        if rows and make_room(needed, keep=self.file):
            with self._failing_softly(), closing(self._connect()) as database, database:
                database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", rows)

    def _connect(self) -> sqlite3.Connection:
        _use(self.file)
        database = sqlite3.connect(self.file, timeout=WAIT_SECONDS)
        database.text_factory = bytes  # a damaged row may call its value a text
        database.execute("PRAGMA page_size = 16384")  # of a new file
        database.execute("PRAGMA synchronous = OFF")  # what a power failure damages is noticed
        database.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value, checksum)")
        return database

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        """Delete a damaged file; one that can't be used now counts as empty."""
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeDecodeError) as problem:
            # Read-only, a full disk or a lock held for too long are no damage.
            is_damaged = not isinstance(problem, OSError | sqlite3.OperationalError)
            if is_damaged or "no such" in str(problem):
                self._warn(problem)
                _delete(self.file)

    def _warn(self, problem: object) -> None:
        log.warning(f"{self.file} is damaged ({one_line(problem)}) and made again")


def holds_blob(name: str) -> bool:
    """Return whether the cache has a file for this value."""
    return os.path.isfile(Rows(name).file)


def blob(name: str, make: Callable[[], bytes]) -> bytes:
    """Return a single value, from its file or made now."""
    rows, key = Rows(name), name.encode()
    if found := dict(rows.read([key])):
        return found[key]
    made = make()
    rows.write([key], [made])
    return made


# Digests of files


def digests(
    paths: Sequence[Path],
    read: Callable[[Path], bytes],
    *,
    file_of: Callable[[Path], Path] = Path,
) -> list[bytes]:
    """Return the digest of each item's content, b"" where it can't be read.

    Size, time of change of content *and* of the file's entry, and inode decide whether content is
    read: a file that was exchanged with its time kept is noticed. file_of: the file that holds an
    item.
    """
    now = time.time_ns()

    def version(path: Path) -> tuple[bytes, bool]:
        try:
            s = os.stat(file_of(path))
        except (OSError, ValueError):
            return b"", False
        seen = (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)
        is_settled = now - max(s.st_mtime_ns, s.st_ctime_ns) > FRESH_NS
        return key_of(os.fsencode(path.absolute()), f"{seen}".encode()), is_settled

    def content(i: int) -> bytes:
        try:
            return key_of(read(paths[i]))
        except OSError:
            return b""

    table, versions = Rows(name_of("digests")), [version(path) for path in paths]
    known = dict(table.read([key for key, _ in versions]))
    found = [known.get(key, b"") for key, _ in versions]
    missing = [i for i, (key, _) in enumerate(versions) if key and not found[i]]
    pieces = [missing[start : start + _PIECE] for start in range(0, len(missing), _PIECE)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        keys = pool.map(lambda piece: [content(i) for i in piece], pieces)
        for i, key in zip(missing, chain.from_iterable(keys), strict=True):
            found[i] = key
    settled = [i for i in missing if versions[i][1] and found[i]]
    table.write([versions[i][0] for i in settled], [found[i] for i in settled])
    return found


# Arrays by number


class Records:
    """Arrays of one shape, in half precision, by number; OSError where no file can be made.

    They are mapped into memory. The space of all is reserved at the start, so that a full disk is
    noticed there.
    """

    def __init__(self, name: str, shape: tuple[int, ...], count: int) -> None:
        self._key, self._file = name.encode(), cache_directory() / f"{name}.records"
        self._kind = self.kind_of(shape)
        size, before = count * self._kind.itemsize, _size(self._file)
        if not make_room(size, keep=self._file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
        _use(self._file)
        try:
            with self._file.open("r+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:  # macOS, where `write` notices a full disk
                    os.truncate(file.fileno(), size)
        except OSError:
            if not before:
                _delete(self._file)
            raise
        self._records = np.memmap(self._file, self._kind, "r", shape=(count,))
        self._sound = np.zeros(count, dtype=bool)

    @staticmethod
    def kind_of(shape: tuple[int, ...]) -> np.dtype[np.void]:
        """Return the type of a record: an array and its checksum."""
        return np.dtype([("values", np.float16, shape), ("checksum", np.uint32)])

    def read(self, numbers: NDArray[np.int64]) -> NDArray[np.generic] | None:
        """Return arrays (B, …); None if one of them was not written, or is damaged."""
        for number in numbers[~self._sound[numbers]]:
            record = self._records[number]
            if self._sum(number, record["values"]) != record["checksum"]:
                return None
            self._sound[number] = True  # each is checked once
        values: NDArray[np.generic] = self._records["values"][numbers]
        return values

    def write(self, numbers: NDArray[np.int64], values: NDArray[np.generic]) -> None:
        """Write arrays (B, …); OSError if the disk fails."""
        record = np.empty((), self._kind)
        with self._file.open("r+b") as file:
            for number, value in zip(numbers, values, strict=True):
                if not self._sound[number]:
                    record["values"], record["checksum"] = value, self._sum(number, value)
                    # Not through the memory map, where a failing disk would kill the process.
                    os.pwrite(file.fileno(), record.tobytes(), int(number) * self._kind.itemsize)

    def _sum(self, number: np.int64, value: NDArray[np.generic]) -> int:
        return _checksum(b"%s %d" % (self._key, number), value.tobytes())
