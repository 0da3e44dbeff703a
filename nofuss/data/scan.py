"""Check every picture before training starts: which can't be used, and which are copies.

Each file is hashed and decoded once. The result is kept in the cache with the file's path, size and
time of change, so that a second scan only compares these. Files are never modified.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nofuss.data.cache import cache_directory, read_notes, write_notes
from nofuss.data.collection import Collection
from nofuss.data.decode import MAX_ASPECT, MAX_FILE, MAX_PIXELS, PictureError, decode
from nofuss.data.duplicates import exact_copies
from nofuss.data.items import file_of, read_item
from nofuss.files import csv_text, digest
from nofuss.progress import Progress, silent

PIECE = 16
"""Files that a thread checks at once: one at a time, small files wait for the interpreter."""
DUPLICATE, CONFLICT = "duplicate", "duplicate with another label"
VERSION = f"4 {MAX_PIXELS} {MAX_ASPECT}"


class Problem(NamedTuple):
    """One file that can't be used or is a copy, and why."""

    item: int
    name: str
    reason: str
    detail: str


@dataclass(frozen=True)
class ScanReport:
    """What a scan found; `readable` are the indices for `Collection.subset`."""

    count: int
    problems: tuple[Problem, ...]
    copies: tuple[tuple[int, ...], ...] = ()
    """Groups of items whose files have the same content."""

    @property
    def readable(self) -> NDArray[np.int64]:
        """Items that can be decoded, copies included: the benchmarks count these."""
        kept = np.ones(self.count, dtype=bool)
        kept[[p.item for p in self.problems if p.reason not in (DUPLICATE, CONFLICT)]] = False
        return np.flatnonzero(kept)

    def summary(self) -> str:
        """Return one line: "11,788 images checked: 2 truncated, 1 oversized"."""
        reasons = Counter(problem.reason for problem in self.problems)
        counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
        return f"{self.count:,} images checked: {counts or 'no problems'}"

    def as_csv(self) -> str:
        """Return all problems as a table: file, reason, detail."""
        rows = [(p.name, p.reason, p.detail) for p in self.problems]
        return csv_text([("file", "reason", "detail"), *rows])


class Finding(NamedTuple):
    """The state of one file: size, time of change, digest of its content, and what is wrong."""

    size: int
    mtime_ns: int
    digest: str
    reason: str
    detail: str


def scan_pictures(collection: Collection, *, progress: Progress = silent) -> ScanReport:
    """Hash and decode every picture file of the collection; for other kinds nothing is done."""
    if collection.kind != "pictures":
        return ScanReport(len(collection), ())
    cache_file = _cache_file(collection)
    known = _recall(cache_file)
    paths, findings = collection.paths, list[Finding]()
    pieces = [paths[start : start + PIECE] for start in range(0, len(paths), PIECE)]
    progress("checking files", 0, len(paths))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda piece: [_look(p, known.get(str(p))) for p in piece], pieces):
            findings += found
            progress("checking files", len(findings), len(paths))
    files = dict(zip(map(str, paths), findings, strict=True))
    if files != known:
        write_notes(cache_file, {"version": VERSION, "files": files})
    copies = exact_copies([finding.digest or None for finding in findings])
    problems = _problems(collection, findings, copies)
    return ScanReport(len(collection), tuple(problems), tuple(map(tuple, copies)))


def _look(path: Path, known: Finding | None) -> Finding:
    try:
        status = file_of(path).stat()
        version = (status.st_size, status.st_mtime_ns)
    except OSError as error:
        return Finding(-1, -1, "", "missing", error.strerror or "")
    if known is not None and known[:2] == version and known.digest:
        return known  # an unreadable file is tried again: new permissions don't change its time
    try:
        content = digest(read_item(path, limit=MAX_FILE))
        decode(path, at_least=1)  # the complete file, at the smallest scale
    except PictureError as error:
        return Finding(*version, "", error.reason, error.detail)
    except OSError as error:
        return Finding(*version, "", "unreadable", error.strerror or "")
    return Finding(*version, content, "", "")


def _problems(
    collection: Collection, findings: Sequence[Finding], copies: Sequence[list[int]]
) -> list[Problem]:
    """List bad files, and all but the first of each group of copies (all, if labels disagree)."""
    names, labels = collection.names, collection.labels
    problems = [
        Problem(i, names[i], finding.reason, finding.detail)
        for i, finding in enumerate(findings)
        if finding.reason
    ]
    for same in copies:
        first, *others = same
        if labels is not None and len(set(labels[same])) > 1:
            classes = ", ".join(sorted({collection.class_names[labels[i]] for i in same}))
            problems += [Problem(i, names[i], CONFLICT, f"labelled {classes}") for i in same]
        else:
            problems += [Problem(i, names[i], DUPLICATE, f"of {names[first]}") for i in others]
    return sorted(problems)


def _cache_file(collection: Collection) -> Path:
    place = f"{collection.root}\0{collection.layout}\0{collection.name}"
    return cache_directory() / "scans" / f"{digest(os.fsencode(place))}.json"


def _recall(cache_file: Path) -> dict[str, Finding]:
    """Read the findings of an earlier scan; empty if the file is missing or damaged."""
    try:
        content = read_notes(cache_file)
        if content.get("version") != VERSION:
            return {}
        return {path: Finding(*finding) for path, finding in content["files"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}
