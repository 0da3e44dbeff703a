"""Decoded and resized pictures in one memory-mapped file: decode once, then only copy.

    <cache>/pictures/CACHEDIR.TAG            marks the folder as ours
    <cache>/pictures/<key>/pixels.bin        uint8, picture after picture
    <cache>/pictures/<key>/shapes.npy        (N, 2): height and width of each
    <cache>/pictures/<key>/checksums.npy     (N,): CRC-32 of each, checked when it is first used

The key covers the files (path, size, time of change) and the part of the preprocessing that
comes before the crop. A directory is built under another name and renamed when it is complete. To
make room, the sets that were not used for the longest time are deleted. A set that is over the
limit, or would nearly fill the disk, is not kept; its pictures are decoded when they are needed.
Only directories with our names that contain nothing but our files are ever deleted.
"""

import os
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nofuss.config import Preprocessing
from nofuss.data.cache import cache_directory, warn_damaged
from nofuss.data.collection import Collection, printable
from nofuss.data.decode import PictureError, decode_resized
from nofuss.data.items import file_of
from nofuss.files import digest, sync, write_file
from nofuss.progress import Progress, silent

LIMIT = 16 * 2**30
"""Bytes that all sets of decoded pictures may take together."""
ASPECT = 1.5
"""Long side over short side, assumed before the pictures are opened."""
AHEAD = 64
FILES = ("pixels.bin", "shapes.npy", "checksums.npy")
MARKER = "CACHEDIR.TAG"
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"
"""By which backup programs recognise a cache, which needs no backup: bford.info/cachedir."""
_SET, _PARTIAL = re.compile("[0-9a-f]{32}"), re.compile(r"\.partial-(\d{1,9})-\w+")


class DecodedPictures:
    """Pictures of different sizes, one after the other in a flat array of bytes."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        shapes: NDArray[np.int64],
        checksums: NDArray[np.uint32],
        paths: Sequence[Path],
        preprocessing: Preprocessing,
        *,
        place: Path,
    ) -> None:
        self.pixels, self.shapes, self.checksums = pixels, shapes, checksums
        self.paths, self.preprocessing, self.place = paths, preprocessing, place
        self.channels = channels(preprocessing)
        self.made_for = before_crop(preprocessing)
        ends = np.cumsum(shapes.prod(axis=1) * self.channels)  # of each picture in the bytes
        self.starts = np.concatenate(([0], ends))
        if len(pixels) != self.starts[-1]:
            raise ValueError(f"{len(pixels):,} bytes of pixels; expected {self.starts[-1]:,}")
        self.starts = self.starts[:-1]
        self._sound = np.zeros(len(shapes), dtype=bool)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Return a view of one picture, (H, W) or (H, W, 3); decode it again if it is damaged."""
        height, width = self.shapes[index]
        start = self.starts[index]
        flat = self.pixels[start : start + height * width * self.channels]
        if not self._sound[index]:
            if zlib.crc32(flat.data) != self.checksums[index]:
                return self._again(index)
            self._sound[index] = True
        return flat.reshape((height, width) if self.channels == 1 else (height, width, -1))

    def _again(self, index: int) -> NDArray[np.uint8]:
        """Decode the file itself, and delete the set, so that the next training makes a new one."""
        if self.place.exists():
            warn_damaged(self.place, f"the pixels of {printable(self.paths[index])} differ")
            _drop(self.place)
        return decode_resized(self.paths[index], self.preprocessing)

    def subset(self, indices: NDArray[np.int64]) -> "DecodedPictures":
        """Return these pictures only, over the same bytes."""
        part = object.__new__(DecodedPictures)
        part.__dict__ |= self.__dict__
        part.shapes, part.starts = self.shapes[indices], self.starts[indices]
        part.checksums, part._sound = self.checksums[indices], self._sound[indices]
        part.paths = [self.paths[int(i)] for i in indices]
        return part


def decode_ahead(
    collection: Collection,
    preprocessing: Preprocessing,
    *,
    limit: int = LIMIT,
    progress: Progress = silent,
) -> Collection:
    """Return the collection with decoded pictures, from the cache or now; unchanged if too many.

    Call it before `subset`, which keeps the decoded pictures: each list of files is another set.
    """
    if collection.kind != "pictures" or not len(collection):
        return collection
    home = cache_directory() / "pictures"
    place = home / _key(collection.paths, preprocessing)
    decoded = _open(place, collection.paths, preprocessing)
    if decoded is None:
        area = preprocessing.resize**2 * (1 if preprocessing.squash else ASPECT)
        expected = int(len(collection) * area * channels(preprocessing))
        try:
            if not _claim(home):
                return collection
            if expected <= limit:
                _make_room(home, limit - expected)
            # A fifth of the free space stays free, and a set over the limit is not even begun.
            if expected <= min(limit, 0.8 * shutil.disk_usage(home).free):
                _build(place, collection.paths, preprocessing, limit, progress)
                decoded = _open(place, collection.paths, preprocessing)
        except OSError:  # a full or read-only disk: decode when needed instead
            progress("decoding pictures once", len(collection), len(collection))
            decoded = None
    return replace(collection, decoded=decoded)


def before_crop(preprocessing: Preprocessing) -> tuple[int, bool, str]:
    """Return the part of the preprocessing that decoded pictures depend on."""
    return preprocessing.resize, preprocessing.squash, preprocessing.mode


def channels(preprocessing: Preprocessing) -> int:
    """Return 1 for "L", 3 for "RGB"."""
    return 1 if preprocessing.mode == "L" else 3


def _key(paths: Sequence[Path], preprocessing: Preprocessing) -> str:
    def version(path: Path) -> bytes:
        try:
            status = file_of(path).stat()
        except OSError as error:
            raise PictureError(printable(path), "missing", error.strerror or "") from error
        changed = f"\0{status.st_size} {status.st_mtime_ns}\0".encode()
        return os.fsencode(path.absolute()) + changed

    made_for = f"1 {before_crop(preprocessing)}".encode()
    return digest(made_for, *map(version, paths))


def _open(
    place: Path, paths: Sequence[Path], preprocessing: Preprocessing
) -> DecodedPictures | None:
    """Open the complete set at `place`; None if there is none, or a damaged one."""
    if not place.is_dir():
        return None
    try:
        shapes, checksums = (np.load(place / name, allow_pickle=False) for name in FILES[1:])
        pixels = np.asarray(np.memmap(place / FILES[0], dtype=np.uint8, mode="r"))
        if shapes.shape != (len(paths), 2) or shapes.dtype != np.int64 or shapes.min() < 1:
            raise ValueError("its shapes do not fit the pictures")
        if checksums.shape != (len(paths),) or checksums.dtype != np.uint32:
            raise ValueError("its checksums do not fit the pictures")
        decoded = DecodedPictures(pixels, shapes, checksums, paths, preprocessing, place=place)
        os.utime(place)  # used last, deleted last
        return decoded
    except (OSError, ValueError, EOFError) as problem:
        warn_damaged(place, problem)
        _drop(place)
        return None


def _build(
    place: Path,
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    limit: int,
    progress: Progress,
) -> None:
    """Decode all pictures into a directory that appears at `place` once it is complete.

    Not `write_folder`: a set that another process may be reading is not replaced, and the name of
    an incomplete one has the process's number, so that what a dead process left can be cleared.
    """
    progress("decoding pictures once", 0, len(paths))
    partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".partial-{os.getpid()}-"))
    try:
        shapes = np.empty((len(paths), 2), dtype=np.int64)
        checksums = np.empty(len(paths), dtype=np.uint32)
        with (partial / "pixels.bin").open("wb") as file:
            for i, picture in enumerate(_decoded(paths, preprocessing)):
                content = np.ascontiguousarray(picture).data
                shapes[i], checksums[i] = picture.shape[:2], zlib.crc32(content)
                file.write(content)
                if file.tell() > limit:
                    raise OSError("over the limit")
                progress("decoding pictures once", i + 1, len(paths))
        sync(partial / "pixels.bin")
        for name, array in (("shapes.npy", shapes), ("checksums.npy", checksums)):
            np.save(partial / name, array)
            sync(partial / name)
        try:
            partial.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            # Another process was faster: its set has the same key, so it is used, and ours goes.
    finally:
        _drop(partial)


def _decoded(paths: Sequence[Path], preprocessing: Preprocessing) -> Iterator[NDArray[np.uint8]]:
    """Yield pictures in order, decoded in threads, at most a few dozen ahead."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), AHEAD):
            chunk = paths[start : start + AHEAD]
            yield from pool.map(lambda path: decode_resized(path, preprocessing), chunk)


def _claim(home: Path) -> bool:
    """Make and mark the folder of all sets; return False if it contains files of other programs."""
    home.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        if (home / MARKER).read_text(errors="replace").startswith(SIGNATURE):
            return True
    if not all(_is_ours(place, _SET) or _is_ours(place, _PARTIAL) for place in home.iterdir()):
        warnings.warn(
            f"{home} holds what nofuss did not make, so decoded pictures are not kept there; "
            "set NOFUSS_CACHE to another folder",
            stacklevel=3,
        )
        return False
    write_file(home / MARKER, f"{SIGNATURE}\n# Pictures as nofuss decoded them; made again.\n")
    return True


def _is_ours(place: Path, names: re.Pattern[str]) -> bool:
    """Return whether a folder has a name of ours, and contains nothing but our files."""
    if not names.fullmatch(place.name) or place.is_symlink() or not place.is_dir():
        return False
    return {entry.name for entry in place.iterdir()} <= set(FILES)


def _drop(place: Path) -> None:
    """Delete our files, and the folder if nothing else is in it."""
    with suppress(OSError):
        for name in FILES:
            (place / name).unlink(missing_ok=True)
        place.rmdir()


def _make_room(home: Path, room: int) -> None:
    """Delete sets, longest unused first, down to `room` bytes; and what dead processes left."""
    for place in home.iterdir():
        name = _PARTIAL.fullmatch(place.name)
        if name and _is_ours(place, _PARTIAL) and not _alive(int(name[1])):
            _drop(place)
    sets = [place for place in home.iterdir() if _is_ours(place, _SET)]
    total = 0
    for place in sorted(sets, key=lambda place: place.stat().st_mtime, reverse=True):
        total += sum(file.stat().st_size for file in place.iterdir())
        if total > room:
            _drop(place)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
