"""Decoded and resized pictures in one memory-mapped file: decode once, then only copy.

    <cache>/pictures/<key>/pixels.bin     uint8, picture after picture
    <cache>/pictures/<key>/shapes.npy     (N, 2): height and width of each

The key covers the files (path, size, time of change) and the part of the preprocessing that
comes before the crop. A directory is built under another name and renamed when complete. The
oldest ones make room for new ones; a set that is over the limit, or does not fit the disk
comfortably, is not kept at all, and its pictures are decoded as they are needed.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.config import Preprocessing
from nofuss.data.cache import cache_directory
from nofuss.data.collection import Collection, printable
from nofuss.data.decode import PictureError, decode_resized

LIMIT = 16 * 2**30
"""Bytes that all sets of decoded pictures may take together."""
ASPECT = 1.5
"""Long side over short side, as guessed before the pictures are opened."""
AHEAD = 64

Progress = Callable[[int, int], object]
"""Called with how many are done, and of how many."""


class DecodedPictures:
    """Pictures of different sizes, one behind the other in a flat array of bytes."""

    def __init__(
        self, pixels: NDArray[np.uint8], shapes: NDArray[np.int64], preprocessing: Preprocessing
    ) -> None:
        self.pixels, self.shapes = pixels, shapes
        self.channels = channels(preprocessing)
        self.made_for = before_crop(preprocessing)
        ends = np.cumsum(shapes.prod(axis=1) * self.channels)
        self.starts = np.concatenate(([0], ends))
        if len(pixels) != self.starts[-1]:
            raise ValueError(f"{len(pixels):,} bytes of pixels; expected {self.starts[-1]:,}")
        self.starts = self.starts[:-1]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """A view of one picture, (H, W) or (H, W, 3)."""
        height, width = self.shapes[index]
        start = self.starts[index]
        flat = self.pixels[start : start + height * width * self.channels]
        return flat.reshape((height, width) if self.channels == 1 else (height, width, -1))

    def subset(self, indices: NDArray[np.int64]) -> "DecodedPictures":
        """These pictures only, over the same bytes."""
        part = object.__new__(DecodedPictures)
        part.pixels, part.channels, part.made_for = self.pixels, self.channels, self.made_for
        part.shapes, part.starts = self.shapes[indices], self.starts[indices]
        return part


def decode_ahead(
    collection: Collection,
    preprocessing: Preprocessing,
    *,
    limit: int = LIMIT,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Collection:
    """The collection with its pictures decoded, from the cache or now; unchanged if too many.

    Call it before `subset`, which keeps what is decoded: each list of files is a set of its own.
    """
    if collection.kind != "pictures" or not len(collection):
        return collection
    home = cache_directory() / "pictures"
    place = home / _key(collection.paths, preprocessing)
    decoded = _open(place, len(collection), preprocessing)
    if decoded is None:
        area = preprocessing.resize**2 * (1 if preprocessing.squash else ASPECT)
        expected = int(len(collection) * area * channels(preprocessing))
        try:
            home.mkdir(parents=True, exist_ok=True)
            if expected <= limit:
                _make_room(home, limit - expected)
            if expected <= min(limit, 0.8 * shutil.disk_usage(home).free):
                _build(place, collection.paths, preprocessing, limit, progress, workers)
                decoded = _open(place, len(collection), preprocessing)
        except OSError:  # a full or read-only disk: decode as needed instead
            decoded = None
    return replace(collection, decoded=decoded)


def before_crop(preprocessing: Preprocessing) -> tuple[int, bool, str]:
    """The part of the preprocessing that decoded pictures depend on."""
    return preprocessing.resize, preprocessing.squash, preprocessing.mode


def channels(preprocessing: Preprocessing) -> int:
    """1 for "L", 3 for "RGB"."""
    return 1 if preprocessing.mode == "L" else 3


def _key(paths: Sequence[Path], preprocessing: Preprocessing) -> str:
    key = hashlib.blake2b(f"1 {before_crop(preprocessing)}".encode(), digest_size=16)
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise PictureError(printable(path), "missing", error.strerror or "") from error
        key.update(os.fsencode(path.absolute()))
        key.update(f"\0{status.st_size} {status.st_mtime_ns}\0".encode())
    return key.hexdigest()


def _open(place: Path, count: int, preprocessing: Preprocessing) -> DecodedPictures | None:
    """The finished set at `place`; None where there is none, or a damaged one."""
    try:
        shapes = np.load(place / "shapes.npy", allow_pickle=False)
        pixels = np.asarray(np.memmap(place / "pixels.bin", dtype=np.uint8, mode="r"))
        if shapes.shape != (count, 2) or shapes.min() < 1:
            raise ValueError("other pictures")
        decoded = DecodedPictures(pixels, shapes, preprocessing)
        os.utime(place)  # used last: dropped last
        return decoded
    except (OSError, ValueError, EOFError):
        shutil.rmtree(place, ignore_errors=True)
        return None


def _build(
    place: Path,
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    limit: int,
    progress: Progress | None,
    workers: int | None,
) -> None:
    """Decode all pictures into a directory that appears at `place` once it is whole."""
    partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".partial-{os.getpid()}-"))
    try:
        shapes = np.empty((len(paths), 2), dtype=np.int64)
        with (partial / "pixels.bin").open("wb") as file:
            for i, picture in enumerate(_decoded(paths, preprocessing, workers)):
                shapes[i] = picture.shape[:2]
                file.write(np.ascontiguousarray(picture).data)
                if file.tell() > limit:
                    raise OSError("over the limit")
                if progress is not None:
                    progress(i + 1, len(paths))
            file.flush()
            os.fsync(file.fileno())
        with (partial / "shapes.npy").open("wb") as file:
            np.save(file, shapes)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _decoded(
    paths: Sequence[Path], preprocessing: Preprocessing, workers: int | None
) -> Iterator[NDArray[np.uint8]]:
    """Pictures in order, decoded in threads, a few dozen ahead at most."""
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for start in range(0, len(paths), AHEAD):
            chunk = paths[start : start + AHEAD]
            yield from pool.map(lambda path: decode_resized(path, preprocessing), chunk)


def _make_room(home: Path, room: int) -> None:
    """Drop sets, the longest unused first, until all take at most `room` bytes; and remains."""
    sets = sorted((d for d in home.iterdir() if d.is_dir()), key=lambda d: d.stat().st_mtime)
    total = 0
    for place in reversed(sets):
        if place.name.startswith(".partial-"):
            if not _alive(int(place.name.split("-")[1])):
                shutil.rmtree(place, ignore_errors=True)
            continue
        total += sum(file.stat().st_size for file in place.iterdir())
        if total > room:
            shutil.rmtree(place, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
