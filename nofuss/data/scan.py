"""Which pictures can't be used, and which are duplicates.

Each file is hashed and decoded once: contents that can be decoded are noted in the cache, with how
they look, by the scan or by whatever computes features of them (`note_looks`). Files are never
modified. The report and `nofuss doctor` list the same duplicates, those of `find_duplicates`.

Exact copies have equal digests. Near duplicates differ by size, compression or a touch of colour
only. They are found in two steps: a 64-bit difference hash (is a pixel of the 9 × 8 thumbnail
brighter than its right neighbour?) finds candidates, and the correlation of their standardised
16 × 16 thumbnails confirms them. Pictures with equal hashes are compared as one. Pictures of less
than 64 pixels are compared by content alone: at that size different characters look alike.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from nofuss.cache import Rows, name_of
from nofuss.data.collection import Collection
from nofuss.data.decode import FORMATS, MAX_ASPECT, MAX_FILE, MAX_PIXELS, PictureError, decode
from nofuss.data.items import content_keys
from nofuss.files import csv_text
from nofuss.progress import Progress, silent, working

PIECE = 16
"""Files that a thread checks at once: one at a time, small files wait for the interpreter."""
DUPLICATE, CONFLICT = "duplicate", "duplicate with another label"
MADE_OF = f"{PIL.__version__} {FORMATS} {MAX_FILE} {MAX_PIXELS} {MAX_ASPECT}".encode()
CHUNK = 1024
"""Files after which what was found is written: a killed scan loses no more."""
MOST_COMPARED = 200_000
"""Pictures that are compared with each other; of more, only those of equal content are found."""
BITS = 8
"""Candidates differ in at most this many bits of 64."""
LIKENESS = 0.95
"""Near duplicates have thumbnails whose correlation is at least this."""
SIDE = 16
SMALLEST = 64
"""Pixels that both sides of a picture must have for it to be a near duplicate."""
BLOCK = 512
"""Hashes that are compared with as many others at once: memory does not grow with the square."""


class Problem(NamedTuple):
    """One file that can't be used or is a copy, and why."""

    item: int
    name: str
    reason: str
    detail: str


class Finding(NamedTuple):
    """The digest of a file's content, b"" where it can't be used, and how it looks or why not."""

    key: bytes
    look: bytes = b""
    error: PictureError | None = None


@dataclass(frozen=True)
class ScanReport:
    """What a scan found; `readable` are the indices for `Collection.subset`."""

    count: int
    problems: tuple[Problem, ...]

    @property
    def unreadable(self) -> list[Problem]:
        """Items that can't be decoded."""
        return [p for p in self.problems if p.reason not in (DUPLICATE, CONFLICT)]

    @property
    def readable(self) -> NDArray[np.int64]:
        """Items that can be decoded, copies included: the benchmarks count these."""
        return np.setdiff1d(np.arange(self.count), [p.item for p in self.unreadable])

    def summary(self) -> str:
        """Return one line: "11,788 images checked: 2 truncated, 1 oversized"."""
        reasons = Counter(problem.reason for problem in self.problems)
        counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
        return f"{self.count:,} images checked: {counts or 'no problems'}"

    def as_csv(self) -> str:
        """Return all problems as a table: file, reason, detail."""
        return csv_text([("file", "reason", "detail"), *(p[1:] for p in self.problems)])


class Duplicates(NamedTuple):
    """Groups of items."""

    exact: list[list[int]]
    """With the same content."""
    near: list[list[int]]
    """Pictures that look the same, in groups that are not exact copies alone."""


def scan_pictures(collection: Collection, *, progress: Progress = silent) -> ScanReport:
    """Hash and decode every picture file of the collection; for other kinds nothing is done."""
    return _report(collection, _look_at_all(collection.paths, progress))


def report_on(collection: Collection, unreadable: Mapping[int, PictureError]) -> ScanReport:
    """Return what a scan finds where all pictures have been decoded.

    unreadable: row of each that could not be, with the reason.
    """
    findings = [Finding(key) for key in content_keys(collection.paths)]
    for row, error in unreadable.items():
        findings[row] = Finding(b"", error=error)
    return _report(collection, findings)


def note_looks(looks: Mapping[bytes, bytes]) -> None:
    """Note contents that were decoded, by their keys, and how they look: no scan repeats it."""
    _good().write(list(looks), list(looks.values()))


def _good() -> Rows:
    """Return the cache of contents that can be decoded."""
    return Rows(name_of("scans", MADE_OF))


def find_duplicates(collection: Collection, *, progress: Progress = silent) -> Duplicates:
    """Return the items that are there more than once, without those that can't be used."""
    if collection.paths:
        findings = _look_at_all(collection.paths, progress)
        keys, looks = [f.key for f in findings], [f.look for f in findings]
    else:
        images = () if collection.images is None else collection.images
        keys, looks = collection.keys() or [], [look_at(Image.fromarray(row)) for row in images]
    exact = exact_copies(keys)
    if not looks or len(looks) > MOST_COMPARED:
        return Duplicates(exact, [])
    known = set(map(tuple, exact))
    with working(progress, "comparing all pairs of pictures"):
        near = [group for group in near_duplicates(looks) if tuple(group) not in known]
    return Duplicates(exact, near)


def _look_at_all(paths: Sequence[Path], progress: Progress) -> list[Finding]:
    findings, good = list[Finding](), _good()
    if paths:
        progress("checking files", 0, len(paths))
    for start in range(0, len(paths), CHUNK):
        part = paths[start : start + CHUNK]
        keys = content_keys(part)
        known = dict(good.read(keys))
        jobs = list(zip(part, keys, strict=True))
        pieces = [jobs[i : i + PIECE] for i in range(0, len(jobs), PIECE)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for found in pool.map(partial(_look, known), pieces):
                findings += found
                progress("checking files", len(findings), len(paths))
        new = {f.key: f.look for f in findings[start:] if f.key not in known}
        good.write(list(new), list(new.values()))
    return findings


def _look(known: Mapping[bytes, bytes], piece: Sequence[tuple[Path, bytes]]) -> list[Finding]:
    """Decode pictures whose content is not known to be good."""
    findings = []
    for path, key in piece:
        try:  # the complete file, at a small scale
            look = known[key] if key in known else look_at(decode(path, at_least=SMALLEST))
            findings.append(Finding(key, look))
        except PictureError as error:
            findings.append(Finding(b"", error=error))
    return findings


def _report(collection: Collection, findings: Sequence[Finding]) -> ScanReport:
    """List bad files, and all but the first of each group of copies (all, if labels disagree)."""
    names, labels = collection.names, collection.labels
    problems = [
        Problem(i, names[i], finding.error.reason, finding.error.detail)
        for i, finding in enumerate(findings)
        if finding.error is not None
    ]
    for same in exact_copies([finding.key for finding in findings]):
        first, *others = same
        classes = sorted({collection.class_names[labels[i]] for i in same if labels[i] >= 0})
        if len(classes) > 1:
            detail = f"labelled {', '.join(classes)}"
            problems += [Problem(i, names[i], CONFLICT, detail) for i in same]
        else:
            problems += [Problem(i, names[i], DUPLICATE, f"of {names[first]}") for i in others]
    return ScanReport(len(collection), tuple(sorted(problems)))


# Copies


def exact_copies(keys: Sequence[bytes]) -> list[list[int]]:
    """Return groups of two or more positions with the same digest; b"" is equal to nothing."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, content in enumerate(keys):
        if content:
            groups[content].append(i)
    return [group for group in groups.values() if len(group) > 1]


def look_at(image: Image.Image) -> bytes:
    """Return the difference hash and the gray thumbnail of a picture; b"" if it is too small."""
    if min(image.size) < SMALLEST:
        return b""
    gray = image.convert("L")
    small = np.asarray(gray.resize((9, 8), Image.Resampling.BOX))
    thumbnail = gray.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.packbits(small[:, :-1] > small[:, 1:]).tobytes() + thumbnail.tobytes()


def near_duplicates(looks: Sequence[bytes]) -> list[list[int]]:
    """Return groups of two or more pictures that look alike, directly or through others.

    looks: what `look_at` returned; a picture without is like no other.
    """
    rows = [i for i, look in enumerate(looks) if look]
    table = np.frombuffer(b"".join(looks), np.uint8).reshape(len(rows), 8 + SIDE**2)
    thumbnails = table[:, 8:].astype(np.float32)
    thumbnails -= thumbnails.mean(1, keepdims=True)
    lengths = np.linalg.norm(thumbnails, axis=1, keepdims=True)
    thumbnails /= np.where(lengths, lengths, 1)
    groups = group_alike(np.unpackbits(table[:, :8], axis=1).astype(bool), thumbnails)
    return [[rows[i] for i in group] for group in groups]


def group_alike(bits: NDArray[np.bool_], thumbnails: NDArray[np.float32]) -> list[list[int]]:
    """Return groups of near duplicates, given hashes (N, 64) and thumbnails of unit length."""
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(range(len(bits)))
    for i, j in _pairs(bits):
        if not groups.connected(i, j) and float(thumbnails[i] @ thumbnails[j]) >= LIKENESS:
            groups.merge(i, j)
    return sorted(sorted(group) for group in groups.subsets() if len(group) > 1)


def _pairs(bits: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield pairs whose hashes are close: neighbours in a chain of equal ones, then others."""
    hashes, which = np.unique(bits, axis=0, return_inverse=True)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, h in enumerate(which.reshape(-1).tolist()):
        members[h].append(i)
    for same in members.values():
        yield from pairwise(same)
    signs: Tensor = torch.from_numpy(hashes).float() * 2 - 1  # (H, 64) of ±1
    starts = range(0, len(signs), BLOCK)
    for a, b in combinations_with_replacement(starts, 2):
        # Over ±1, a·b is the number of equal bits minus that of different ones.
        agreement = signs[a : a + BLOCK] @ signs[b : b + BLOCK].T  # (BLOCK, BLOCK)
        is_close = agreement >= hashes.shape[1] - 2 * BITS
        for i, j in zip(*(axis.tolist() for axis in is_close.nonzero(as_tuple=True)), strict=True):
            if a + i < b + j:  # each pair once, and none with itself
                yield members[a + i][0], members[b + j][0]
