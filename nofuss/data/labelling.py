"""Which class a picture has by its path, and what was passed over on the way.

photos/birds/wren/1.jpg      the innermost folder: class "birds/wren"
--class-level 1              the outermost: class "birds"
--label-pattern '^(.+)_'     a part of the path: wren_17.jpg has class "wren"
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nofuss.config import TrainConfig, check_limits
from nofuss.data.collection import TEST, TRAIN, Collection, printable
from nofuss.errors import UsageError

SPLIT_WORDS = {"train": TRAIN, "test": TEST, "val": TEST, "valid": TEST, "validation": TEST}
"""Names of folders and files → the side of the split they are on."""
_NAMED = 5  # files in a note; `nofuss doctor --json` has all
_NUMBERED = re.compile(r"(.*?[^\W\d_])[ _.-]*\d+\.\w+")


class Labelling(NamedTuple):
    """How the class of a picture is read from its path."""

    class_level: int | None = None
    """Depth of the folder that is the class, from 1 for the outermost; None: the innermost."""
    label_pattern: str | None = None
    """A regular expression whose first group, searched in the path, is the class."""

    def class_of(self, picture: Path) -> str | None:
        """Return the class of a picture, given by its path below the data; None if it has none."""
        if self.label_pattern is not None:
            found = re.search(self.label_pattern, picture.as_posix())
            return found[1 if found.re.groups else 0] or None if found else None
        folders = picture.parts[:-1]
        return os.path.join(*folders[: self.class_level]) if folders else None

    def describe(self) -> str:
        """Return how classes are found, for a collection's layout; empty for the usual way."""
        if self.label_pattern is not None:
            return f", classes by the pattern {printable(self.label_pattern)}"
        return f", classes by folders at level {self.class_level}" if self.class_level else ""


BY_FOLDER = Labelling()


def labelling_of(config: TrainConfig) -> Labelling:
    """Return how a run labels its pictures; UsageError for a level or a pattern that is none."""
    check_limits(config)
    try:
        re.compile(config.label_pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--label-pattern {config.label_pattern!s:.200} is not a regular expression: {error}; "
            "an example is '^(.+)_' for robin_17.jpg"
        ) from error
    return Labelling(config.class_level, config.label_pattern)


def check_used(collection: Collection, labelling: Labelling) -> None:
    """Raise UsageError if data have labels of their own, so that paths were not looked at."""
    if not collection.layout.endswith(labelling.describe()):
        raise UsageError(
            "--class-level and --label-pattern are for folders of pictures; "
            f"{collection.name} ({collection.layout}) has labels of its own; drop them"
        )


def suggested_pattern(names: Iterable[str]) -> str:
    """Return a hint where file names look like robin_17.jpg, wren_3.jpg: words, then a number."""
    groups: defaultdict[str, int] = defaultdict(int)
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            return ""
        groups[found[1]] += 1
    if len(groups) < 2 or max(groups.values()) < 2:
        return ""
    return (
        f"; their names have {len(groups):,} words before a number: "
        r"--label-pattern '([^/]*?[^\W\d_])[ _.-]*\d+\.\w+$' makes these the classes"
    )


def sides_by_name(files: Sequence[Path]) -> list[str] | None:
    """Return the side of each file by a word in its path, as in train-000.tar; None without."""

    def side(file: Path) -> str | None:
        words = re.split(r"[^a-z]+", f"{file.parent.name} {file.stem}".lower())
        found = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
        return found.pop() if len(found) == 1 else None

    sides = [found for file in files if (found := side(file))]
    return sides if len(sides) == len(files) and TRAIN in sides and TEST in sides else None


def few(names: Sequence[str]) -> str:
    """Return the first five names, for a note: "a.txt, b.txt, …"."""
    return ", ".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])


def skipped_notes(skipped: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a line a reason: the number of names with it, and the first five.

    skipped: names, each with a reason in the plural, as in "hidden files".
    """
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped:
        by_reason[reason].append(name)
    return tuple(
        f"{len(names):,} {reason} skipped: {few(sorted(names))}"
        for reason, names in by_reason.items()
    )


class PassedOver:
    """Files and folders that are not used, by the reason."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, reason: str, *paths: str | Path) -> None:
        """Note files under a reason in the plural, as in "hidden files"."""
        self._names[reason] += [printable(os.path.relpath(path, self.root)) for path in paths]

    def notes(self) -> tuple[str, ...]:
        """Return a line a reason."""
        return skipped_notes(self.listed())

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Return the name and the reason of each."""
        return tuple((name, reason) for reason, names in self._names.items() for name in names)
