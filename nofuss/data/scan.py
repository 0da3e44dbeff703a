"""Check every picture before training starts: which can't be used, and which are copies.

Each file is hashed and decoded once: contents that can be decoded are noted in the cache. Files are
never modified.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray

from nofuss.cache import Rows, key_of
from nofuss.data.collection import Collection
from nofuss.data.decode import FORMATS, MAX_ASPECT, MAX_FILE, MAX_PIXELS, PictureError, decode
from nofuss.data.duplicates import exact_copies
from nofuss.data.items import content_keys
from nofuss.files import csv_text
from nofuss.progress import Progress, silent

PIECE = 16
"""Files that a thread checks at once: one at a time, small files wait for the interpreter."""
DUPLICATE, CONFLICT = "duplicate", "duplicate with another label"
VERSION = f"4 {PIL.__version__} {FORMATS} {MAX_FILE} {MAX_PIXELS} {MAX_ASPECT}".encode()
CHUNK = 1024
"""Files after which what was found is written: a killed scan loses no more."""


class Problem(NamedTuple):
    """One file that can't be used or is a copy, and why."""

    item: int
    name: str
    reason: str
    detail: str


class Finding(NamedTuple):
    """The digest of a file's content, and what is wrong with it."""

    key: bytes
    reason: str = ""
    detail: str = ""


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


def scan_pictures(collection: Collection, *, progress: Progress = silent) -> ScanReport:
    """Hash and decode every picture file of the collection; for other kinds nothing is done."""
    if collection.kind != "pictures":
        return ScanReport(len(collection), ())
    paths, findings = collection.paths, list[Finding]()
    good = Rows(f"scans-{key_of(VERSION).hex()}")
    progress("checking files", 0, len(paths))
    for start in range(0, len(paths), CHUNK):
        part = paths[start : start + CHUNK]
        keys = content_keys(part)
        known = {key for key, _ in good.read(keys)}
        jobs = list(zip(part, keys, strict=True))
        pieces = [jobs[at : at + PIECE] for at in range(0, len(jobs), PIECE)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for found in pool.map(partial(_look, known), pieces):
                findings += found
                progress("checking files", len(findings), len(paths))
        new = [f.key for f in findings[start:] if not f.reason and f.key not in known]
        good.write(new, [b""] * len(new))
    copies = exact_copies([None if f.reason or not f.key else f.key for f in findings])
    problems = _problems(collection, findings, copies)
    return ScanReport(len(collection), tuple(problems), tuple(map(tuple, copies)))


def _look(known: set[bytes], piece: Sequence[tuple[Path, bytes]]) -> list[Finding]:
    """Decode pictures whose content is not known to be good."""
    findings = []
    for path, key in piece:
        finding = Finding(key)
        if not key or key not in known:
            try:
                decode(path, at_least=1)  # the complete file, at the smallest scale
            except PictureError as error:
                finding = Finding(key, error.reason, error.detail)
        findings.append(finding)
    return findings


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
        if len(set(labels[same])) > 1:
            classes = ", ".join(sorted({collection.class_names[labels[i]] for i in same}))
            problems += [Problem(i, names[i], CONFLICT, f"labelled {classes}") for i in same]
        else:
            problems += [Problem(i, names[i], DUPLICATE, f"of {names[first]}") for i in others]
    return sorted(problems)
