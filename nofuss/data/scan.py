"""Which pictures can't be used, and which are duplicates.

Each file is hashed and decoded once: contents that can be decoded are noted in the cache, with how
they look, by the scan or by whatever computes features of them (`note_looks`). Files are never
modified. The report and `nofuss doctor` list the same duplicates, those of `find_duplicates`.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from nofuss.cache import Rows, name_of
from nofuss.data.collection import Collection
from nofuss.data.decode import FORMATS, MAX_ASPECT, MAX_FILE, MAX_PIXELS, PictureError, decode
from nofuss.data.duplicates import SMALLEST, exact_copies, look_at, near_duplicates
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
        if len(set(labels[same])) > 1:
            classes = ", ".join(sorted({collection.class_names[labels[i]] for i in same}))
            problems += [Problem(i, names[i], CONFLICT, f"labelled {classes}") for i in same]
        else:
            problems += [Problem(i, names[i], DUPLICATE, f"of {names[first]}") for i in others]
    return ScanReport(len(collection), tuple(sorted(problems)))
