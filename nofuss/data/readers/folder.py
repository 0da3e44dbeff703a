"""A folder of class folders: the class of a picture is the folder that holds it.

    photos/robin/1.jpg            class "robin"
    photos/birds/wren/1.jpg       class "birds/wren": the innermost folder
    photos/train/robin/1.jpg      class "robin", for training; likewise test/ (or val/)
    --class-level 1               the outermost folder: class "birds"
    --label-pattern '^(.+)_'      a part of the path: wren_17.jpg has class "wren"

Hidden files and files that are not pictures are skipped, counted and named; so are folders beside
train/ and test/.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nofuss.config import Options, Settings, check_limits
from nofuss.data.collection import TEST, TRAIN, Collection, compact_labels, printable, relative
from nofuss.data.decode import SUFFIXES
from nofuss.errors import DataError, UsageError

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


def labelling_of(config: Options | Settings) -> Labelling:
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


class Skipped:
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


_HEIC = "HEIC files, for which pip install 'nofuss[heif]' is needed,"
_UNREAD = {
    ".avif": "AVIF files, for which Pillow 11.3 or newer is needed,",
    **dict.fromkeys((".heic", ".heif"), _HEIC),
}
"""Why pictures with these suffixes are skipped where they are not in SUFFIXES."""


def open_folder(folder: Path, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open the pictures below `folder`, labelled by the folder that contains each."""
    skipped = Skipped(folder)
    pictures = sorted(_walk(folder, skipped), key=os.fsencode)
    if not pictures:
        notes = "".join(f"; {note}" for note in skipped.notes())
        raise DataError(
            f"{printable(folder)} holds no pictures; expected a folder of class folders with "
            f"JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF files{notes}"
        )
    sides = _sides(folder, pictures, skipped)
    labelled, loose = list[tuple[Path, str, str]](), list[Path]()
    for picture in sides.pictures:
        below = relative(picture, folder)
        top = below.parts[0] if sides.folders else ""
        label = labelling.class_of(below.relative_to(top) if top else below)
        if label is None:
            loose.append(picture)
        else:
            labelled.append((picture, label, SPLIT_WORDS[top] if top else ""))
    if not labelled:
        raise _no_classes(folder, loose, sides, labelling)
    deepest = max(len(Path(label).parts) for _, label, _ in labelled)
    if labelling.label_pattern is None and deepest < (labelling.class_level or 0):
        raise DataError(
            f"--class-level is {labelling.class_level}, but the folders in {printable(folder)} "
            f"are {deepest} deep; lower it, or leave it out"
        )
    if loose and labelling.label_pattern is not None:
        skipped.add("pictures that --label-pattern does not match", *loose)
    elif loose:
        skipped.add("pictures outside any class folder", *loose)
    labels, names = compact_labels([os.fsencode(label) for _, label, _ in labelled])
    layout = "folder of class folders"
    if sides.folders:
        layout = f"class folders in {' and '.join(sides.folders)}"
    paths = [picture for picture, _, _ in labelled]
    return Collection(
        name=folder.name,
        layout=layout + labelling.describe(),
        paths=paths,
        root=folder,
        labels=labels,
        class_names=tuple(printable(os.fsdecode(name)) for name in names),
        split=np.array([side for _, _, side in labelled]) if sides.folders else None,
        notes=(*skipped.notes(), *_depth_note(labelled, labelling)),
        skipped=skipped.listed(),
    )


class _Sides(NamedTuple):
    """The pictures in train/ and test/, and these folders; all pictures where there are none."""

    pictures: list[Path]
    folders: list[str]


def _sides(folder: Path, pictures: list[Path], skipped: Skipped) -> _Sides:
    """Recognise train/ and test/ (or val/); skip what lies beside them, in words."""
    depths = dict[str, int]()
    for picture in pictures:
        top, *below = relative(picture, folder).parts
        if below:
            depths[top] = max(depths.get(top, 0), len(below))
    words = sorted(depths.keys() & SPLIT_WORDS.keys())
    if {SPLIT_WORDS[word] for word in words} != {TRAIN, TEST}:
        return _Sides(pictures, [])
    foreign = depths.keys() - words
    # Beside other folders, train may be the class of trains: then it holds pictures directly.
    if foreign and min(depths[word] for word in words) < 2:
        return _Sides(pictures, [])
    by_top: defaultdict[str, list[Path]] = defaultdict(list)
    for picture in pictures:
        by_top[relative(picture, folder).parts[0]].append(picture)
    inside = [p for p in pictures if relative(p, folder).parts[0] in words]
    for name in sorted(foreign):
        beside = f"pictures in {printable(name)}, beside {' and '.join(words)},"
        skipped.add(beside, *by_top[name])
    loose = [p for p in pictures if p.parent == folder]
    if loose:
        skipped.add("pictures outside any class folder", *loose)
    return _Sides(inside, words)


def _no_classes(folder: Path, loose: list[Path], sides: _Sides, labelling: Labelling) -> DataError:
    where = printable(folder)
    if labelling.label_pattern is not None:
        example = printable(relative(loose[0], folder))
        return DataError(
            f"--label-pattern {labelling.label_pattern} matches none of the {len(loose):,} "
            f"pictures in {where}; the first is {example}"
        )
    if sides.folders:
        return DataError(
            f"{where} has pictures directly in {' and '.join(sides.folders)}; put those of "
            "each class into a separate folder there"
        )
    return DataError(
        f"{where} holds {len(loose):,} pictures but no class folders; put the pictures of "
        "each class into a separate folder, or list them in a CSV with path,label"
        + suggested_pattern(picture.name for picture in loose)
    )


def _depth_note(labelled: list[tuple[Path, str, str]], labelling: Labelling) -> list[str]:
    """Say that folders lie in folders, and what the outermost ones would be."""
    if labelling != BY_FOLDER:
        return []
    classes = {Path(label) for _, label, _ in labelled}
    depth = max(len(each.parts) for each in classes)
    outermost = {each.parts[0] for each in classes}
    if depth == 1 or len(outermost) == len(classes):
        return []
    return [
        f"folders in folders, {depth} deep: the innermost are the classes; `nofuss train "
        f"--class-level 1` makes the {len(outermost):,} outermost the classes"
    ]


def find_pictures(folder: Path) -> list[Path]:
    """Return all picture files below `folder`, sorted, in class folders or not."""
    return sorted(_walk(folder, Skipped(folder)), key=os.fsencode)


def _walk(top: Path, skipped: Skipped) -> Iterator[Path]:
    """Yield picture files below `top`; each real directory once, so that no link makes a loop."""
    seen: set[tuple[int, int]] = set()
    # Links come last, so that folders are found under their real names.
    folders, links = [top], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            if folder == top:
                raise DataError(f"can't read {printable(top)}: {error.strerror}") from error
            skipped.add("unreadable folders", folder)
            continue
        holds_pictures = holds_folders = False
        for entry in entries:
            suffix = Path(entry.name).suffix.lower()
            if entry.name.startswith("."):
                skipped.add("hidden files", entry.path)
            elif os.path.isdir(entry.path):  # unlike entry.is_dir(), no error on a link to itself
                holds_folders = True
                (links if entry.is_symlink() else folders).append(Path(entry.path))
            elif not os.path.isfile(entry.path):
                # a pipe would block forever
                skipped.add("broken links and special files", entry.path)
            elif suffix in SUFFIXES:
                holds_pictures = True
                yield Path(entry.path)
            else:
                skipped.add(_UNREAD.get(suffix, "files that are not pictures"), entry.path)
        if not holds_pictures and not holds_folders:
            skipped.add("folders without pictures", folder)
