"""Activations in front of the stages that are trained, kept in one memory-mapped file.

    <cache>/activations-<key>.bin     records of float16 values and their CRC-32, view after view

The key covers the weights of the fixed stages, the preprocessing, the seed and the pictures. A
record is written when its view is first needed, and read from then on. It is valid if its checksum
fits: after a kill, the records that are whole are used and the others are computed again, and so is
one that a failing disk has changed. The space of all views is reserved at the start, so a full disk
is noticed there and not in the middle of an epoch; views without space are computed every time.
"""

import errno
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.data.cache import make_room, mark_used
from nofuss.data.sampling import Indices

LIMIT = 8 * 2**30
"""Bytes that all files of activations may take together."""
FREE_SHARE = 0.8
"""Share of the free disk that activations may take."""
NAMES = re.compile(r"activations-[0-9a-f]{32}\.bin")

Compute = Callable[[int, Indices], Tensor]
"""View and rows → activations (B, …) of these pictures."""


class Activations:
    """Activations of `views` views of `count` pictures, read from `file` or computed.

    shape: of one picture's activations. say: called with one line if not all views can be kept.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        shape: tuple[int, ...],
        count: int,
        views: int,
        file: Path | None,
        say: Callable[[str], object],
        limit: int | None = None,
    ) -> None:
        self.compute, self.count, self.views, self._say = compute, count, views, say
        self._record = np.dtype([("values", np.float16, shape), ("checksum", np.uint32)])
        self._descriptor: int | None = None
        self._records = np.empty(0, self._record)
        self._sound = np.zeros(0, dtype=bool)
        if file is not None:
            self._open(file, LIMIT if limit is None else limit)

    @property
    def kept(self) -> int:
        """Number of records that the file has room for."""
        return len(self._records)

    def take(self, view: int, rows: Indices) -> Tensor:
        """Return activations (B, …) of some pictures in a view, in single precision.

        They are rounded to half precision whether or not they are kept, so that the result does not
        depend on the room in the cache.
        """
        places = view * self.count + rows
        if len(places) and places.max() < self.kept and self._are_sound(places):
            values = self._records["values"][places]
        else:
            values = self.compute(view, rows).numpy().astype(np.float16)
            self._write(places, values)
        return torch.from_numpy(values.astype(np.float32))

    def _are_sound(self, places: Indices) -> bool:
        """Return whether all records are whole; each is checked once."""
        for place in places[~self._sound[places]]:
            record = self._records[place]
            if zlib.crc32(record["values"].tobytes()) != record["checksum"]:
                return False
            self._sound[place] = True
        return True

    def _write(self, places: Indices, values: NDArray[np.float16]) -> None:
        """Write records that the file has room for; a disk that fails ends the keeping."""
        if self._descriptor is None:
            return
        for place, row in zip(places, values, strict=True):
            if place >= self.kept or self._sound[place]:
                continue
            record = np.empty((), self._record)
            record["values"], record["checksum"] = row, zlib.crc32(row.tobytes())
            try:  # not through the memory map, where a failing disk would kill the process
                os.pwrite(self._descriptor, record.tobytes(), int(place) * self._record.itemsize)
            except OSError as error:
                self._stop(error)
                return

    def _open(self, file: Path, limit: int) -> None:
        """Open or make the file with room for as many views as the limit and the disk allow."""
        one_view = self.count * self._record.itemsize
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            free = FREE_SHARE * shutil.disk_usage(file.parent).free + _size(file)
            views = min(self.views, int(min(limit, free) // one_view))
            if views and make_room(views * one_view, limit=limit, keep=file, names=NAMES):
                self._map(file, views * self.count)
        except OSError as error:
            self._stop(error)
            return
        if views < self.views:
            needed, room = self.views * one_view / 2**30, min(limit, free) / 2**30
            self._say(
                f"activations take {needed:.1f} GB and the cache has room for {room:.1f}, so "
                f"{self.views - views} of {self.views} views are computed again in every epoch; "
                "NOFUSS_CACHE names another folder"
            )

    def _map(self, file: Path, records: int) -> None:
        size = records * self._record.itemsize
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(file))
            os.posix_fallocate(descriptor, 0, size)
            self._records = np.memmap(file, dtype=self._record, mode="r", shape=(records,))
        except BaseException:
            os.close(descriptor)
            if _size(file) < size:
                file.unlink(missing_ok=True)
            raise
        self._descriptor, self._sound = descriptor, np.zeros(records, dtype=bool)
        mark_used(file)

    def _stop(self, error: OSError) -> None:
        """Keep nothing more; what is kept is still read."""
        self.close()
        self._say(
            f"activations can't be kept ({error.strerror or error}), so the fixed stages run again "
            "in every epoch; free the disk, or set NOFUSS_CACHE to another folder"
        )

    def close(self) -> None:
        """Close the file for writing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
