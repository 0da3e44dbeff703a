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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nofuss.config import Options, Settings, check_limits
from nofuss.data.collection import (
    TEST,
    TRAIN,
    Collection,
    compact_labels,
    printable,
    relative,
    skipped_notes,
)
from nofuss.data.decode import FORMATS, SUFFIXES
from nofuss.data.triplets import NO_LABEL
from nofuss.errors import DataError, UsageError

SPLIT_WORDS = dict.fromkeys(("test", "testing", "val", "valid", "validation", "eval"), TEST)
SPLIT_WORDS |= {"train": TRAIN, "training": TRAIN}
"""Names of folders, files and splits, in lower case → the side of the split they are on."""
OUTSIDE = "pictures outside any class folder"
_HEIC = "HEIC files, for which pip install 'nofuss[heif]' is needed,"
_UNREAD = {
    ".avif": "AVIF files, for which Pillow 11.3 or newer is needed,",
    **dict.fromkeys((".heic", ".heif"), _HEIC),
}
"""Why pictures with these suffixes are skipped where they are not in SUFFIXES."""

Skipped = list[tuple[Path, str]]
"""As `Collection.skipped`, by path."""


class Labelled(NamedTuple):
    """A picture, its class and its side of the split, or ""."""

    picture: Path
    label: str
    side: str = ""


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
    if labelling not in (BY_FOLDER, collection.labelling):
        raise UsageError(
            "--class-level and --label-pattern are for folders of pictures; "
            f"{collection.name} ({collection.layout}) has labels of its own; drop them"
        )


def named(skipped: Skipped, root: Path) -> tuple[tuple[str, str], ...]:
    """Return what was skipped by names relative to `root`, for `Collection.skipped`."""
    return tuple((printable(relative(path, root)), reason) for path, reason in skipped)


def open_folder(
    folder: Path, labelling: Labelling = BY_FOLDER, *, unlabelled: bool = False
) -> Collection:
    """Open the pictures below `folder`, labelled by the folder that contains each.

    unlabelled: keep pictures outside class folders, without a label, also where no others are.
    """
    skipped = Skipped()
    pictures = sorted(_walk(folder, skipped), key=os.fsencode)
    if not pictures:
        notes = "".join(f"; {note}" for note in skipped_notes(named(skipped, folder)))
        raise DataError(
            f"{folder} holds no pictures; expected a folder of class folders with "
            f"{', '.join(FORMATS)} files{notes}"
        )
    tops = _split_folders([relative(picture, folder) for picture in pictures])
    found = [*_labelled(pictures, folder, tops, labelling, skipped)]
    if wrong := _no_classes(found, folder, tops, labelling):
        if not unlabelled:
            raise DataError(wrong)
        return Collection(
            name=folder.name,
            layout="folder of pictures",
            paths=[each.picture for each in found],
            root=folder,
            remarks=() if labelling == BY_FOLDER else (f"without labels: {wrong}",),
            skipped=named(skipped, folder),
        )
    if not unlabelled:
        unmatched = "pictures that --label-pattern does not match"
        reason = OUTSIDE if labelling.label_pattern is None else unmatched
        skipped += [(each.picture, reason) for each in found if not each.label]
        found = [each for each in found if each.label]
    known = [os.fsencode(each.label) for each in found if each.label]
    labels = np.full(len(found), NO_LABEL, dtype=np.int64)
    labels[[each.label != "" for each in found]], names = compact_labels(known)
    sides = [each.side for each in found]
    layout = f"class folders in {' and '.join(tops)}" if tops else "folder of class folders"
    depth, outermost = _depth(found), {Path(each.label).parts[0] for each in found if each.label}
    hint = (
        f"folders in folders, {depth} deep: the innermost are the classes; `nofuss train "
        f"--class-level 1` makes the {len(outermost):,} outermost the classes"
    )
    is_nested = labelling == BY_FOLDER and depth > 1 and 1 < len(outermost) < len(names)
    return Collection(
        name=folder.name,
        layout=layout + labelling.describe(),
        paths=[each.picture for each in found],
        root=folder,
        labels=labels,
        labelling=labelling,
        class_names=tuple(printable(os.fsdecode(name)) for name in names),
        split=np.array(sides) if all(sides) else None,
        remarks=(hint,) if is_nested else (),
        skipped=named(skipped, folder),
    )


def _labelled(
    pictures: list[Path], folder: Path, tops: list[str], labelling: Labelling, skipped: Skipped
) -> Iterator[Labelled]:
    """Yield the pictures with what their paths say; note those in folders beside `tops`."""
    for picture in pictures:
        path = relative(picture, folder)
        top, *below = path.parts
        if not tops:
            yield Labelled(picture, labelling.class_of(path) or "")
        elif top in tops:
            side = SPLIT_WORDS[top.lower()]
            yield Labelled(picture, labelling.class_of(Path(*below)) or "", side)
        elif not below:
            yield Labelled(picture, "")
        else:
            beside = f"pictures in {printable(top)}, beside {' and '.join(tops)},"
            skipped.append((picture, beside))


def _split_folders(pictures: list[Path]) -> list[str]:
    """Return the folders train and test (or val), given paths below the data; none without both."""
    depths = dict[str, int]()
    for picture in pictures:
        top, *below = picture.parts
        if below:
            depths[top] = max(depths.get(top, 0), len(below))
    sides = {top: SPLIT_WORDS[top.lower()] for top in sorted(depths) if top.lower() in SPLIT_WORDS}
    if {*sides.values()} != {TRAIN, TEST}:
        return []
    # Beside other folders, train may be the class of trains: then it holds pictures directly.
    is_class = len(depths) > len(sides) and min(depths[top] for top in sides) < 2
    return [] if is_class else [*sides]


def _depth(found: list[Labelled]) -> int:
    """Return how deep the deepest class folder is."""
    return max(len(Path(each.label).parts) for each in found)


def _no_classes(found: list[Labelled], folder: Path, tops: list[str], labelling: Labelling) -> str:
    """Return why the pictures have no classes as asked, and the cure; empty if they have."""
    loose = [each.picture for each in found if not each.label]
    if len(loose) < len(found):
        if labelling.label_pattern is not None or _depth(found) >= (labelling.class_level or 0):
            return ""
        return (
            f"--class-level is {labelling.class_level}, but the folders in {folder} "
            f"are {_depth(found)} deep; lower it, or leave it out"
        )
    if labelling.label_pattern is not None:
        return (
            f"--label-pattern {labelling.label_pattern} matches none of the {len(loose):,} "
            f"pictures in {folder}; the first is {relative(loose[0], folder)}"
        )
    if tops:
        return (
            f"{folder} has pictures directly in {' and '.join(tops)}; put those of "
            "each class into a separate folder there"
        )
    return (
        f"{folder} holds {len(loose):,} pictures but no class folders; put the pictures of each "
        "class into a separate folder, list them in a CSV with path,label, or read classes from "
        "names like robin_17.jpg with --label-pattern '^(.+)_'"
    )


def find_pictures(folder: Path) -> list[Path]:
    """Return all picture files below `folder`, sorted, in class folders or not."""
    return sorted(_walk(folder, Skipped()), key=os.fsencode)


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
                raise DataError(f"can't read {top}: {error.strerror}") from error
            skipped.append((folder, "unreadable folders"))
            continue
        is_empty = True
        for entry in entries:
            path = Path(entry.path)
            suffix = path.suffix.lower()
            if entry.name.startswith("."):
                skipped.append((path, "hidden files"))
            elif os.path.isdir(path):  # unlike entry.is_dir(), no error on a link to itself
                is_empty = False
                (links if entry.is_symlink() else folders).append(path)
            elif not os.path.isfile(path):  # a pipe would block forever
                skipped.append((path, "broken links and special files"))
            elif suffix in SUFFIXES:
                is_empty = False
                yield path
            else:
                skipped.append((path, _UNREAD.get(suffix, "files that are not pictures")))
        if is_empty:
            skipped.append((folder, "folders without pictures"))
