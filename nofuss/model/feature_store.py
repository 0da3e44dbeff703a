"""Features of pictures by one backbone, kept by picture: <cache>/features-<key>.sqlite.

The key of the file covers all that the features depend on but the picture: weights, preprocessing,
mirroring, device. In the file, a picture is identified by its path, size and time of change (arrays
by their bytes). So only missing features are computed after a picture was added, for a CSV over the
same folder, and in other commands; a killed command loses at most one chunk. Each row has a
checksum; a damaged row or file is computed again.
"""

import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.data.cache import make_room, mark_used, warn_damaged
from nofuss.data.collection import Collection
from nofuss.data.items import file_of
from nofuss.files import array_bytes, digest

WAIT_SECONDS = 30.0
"""How long to wait for another process that writes."""
_PAGE = 16384  # a page holds three rows of 1,280 numbers
_OVERHEAD = 1.5  # of the file over its numbers, at most, for rows of a kilobyte or more
_AT_ONCE = 500  # keys in one query; SQLite allows 999 parameters at least


def picture_keys(collection: Collection) -> list[bytes]:
    """Return a key for each picture of a collection of files or of arrays."""
    if collection.array is not None:
        rows = np.asarray(collection.array)
        shape = f"{rows.dtype}{rows.shape[1:]}".encode()
        return [bytes.fromhex(digest(shape, array_bytes(row))) for row in rows]
    keys = []
    for path in collection.paths:
        try:
            status = file_of(path).stat()
        except OSError:  # deleted since it was listed: reading it will report that
            keys.append(b"")
            continue
        text = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
        keys.append(bytes.fromhex(digest(os.fsencode(text))))
    return keys


class FeatureStore:
    """A file of features, each `width` float32 numbers; what can't be read counts as missing."""

    def __init__(self, file: Path, width: int) -> None:
        self.file, self.width = file, width

    def read(self, keys: Sequence[bytes]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return features (N, width) and which of them are known; the others are zero."""
        features = np.zeros((len(keys), self.width), dtype=np.float32)
        known = np.zeros(len(keys), dtype=bool)
        if not self.file.exists() or not self._is_ours():
            return features, known
        rows: dict[bytes, list[int]] = {}
        for i, key in enumerate(keys):
            if key:
                rows.setdefault(key, []).append(i)
        unique, damaged = list(rows), 0
        with self._failing_softly(), closing(self._open()) as database:
            for start in range(0, len(unique), _AT_ONCE):
                part = unique[start : start + _AT_ONCE]
                marks = ",".join("?" * len(part))
                query = f"SELECT key, value, checksum FROM features WHERE key IN ({marks})"
                for key, value, checksum in database.execute(query, part):
                    is_row = isinstance(value, bytes) and len(value) == 4 * self.width
                    if not is_row or key not in rows or zlib.crc32(value) != checksum:
                        damaged += 1
                        continue
                    features[rows[key]] = np.frombuffer(value, dtype=np.float32)
                    known[rows[key]] = True
        if damaged:
            warn_damaged(self.file, f"{damaged:,} features have another checksum")
        mark_used(self.file)
        return features, known

    def write(self, keys: Sequence[bytes], features: NDArray[np.float32]) -> None:
        """Write features (N, width), all or none of them: none if the disk is full."""
        if not self._is_ours():
            return
        size = self.file.stat().st_size if self.file.exists() else 0
        if not make_room(size + int(_OVERHEAD * features.nbytes), keep=self.file):
            return
        values = (row.tobytes() for row in np.ascontiguousarray(features, dtype=np.float32))
        rows = [(key, value, zlib.crc32(value)) for key, value in zip(keys, values, strict=True)]
        with self._failing_softly():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS features "
                    "(key BLOB PRIMARY KEY, value BLOB NOT NULL, checksum INTEGER NOT NULL)"
                )
                database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)

    def _is_ours(self) -> bool:
        """Return whether the file is regular or does not exist; links and pipes are not used."""
        try:
            return stat.S_ISREG(self.file.lstat().st_mode)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.file, timeout=WAIT_SECONDS)
        database.execute(f"PRAGMA page_size = {_PAGE}")  # of a new file
        return database

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        """Delete a file that is not a database; ignore errors of one that can't be used now."""
        try:
            yield
        except sqlite3.OperationalError:  # read-only, a full disk, locked for too long, no table
            return
        except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:  # a message may quote bytes
            warn_damaged(self.file, problem)
            with suppress(OSError):
                self.file.unlink()
        except OSError:
            return
