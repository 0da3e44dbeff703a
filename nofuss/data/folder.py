"""A folder of class folders: the class of a picture is the folder that holds it.

    photos/robin/1.jpg            class "robin"
    photos/birds/wren/1.jpg       class "birds/wren", or as `labelling.py` says
    photos/train/robin/1.jpg      class "robin", for training; likewise test/ (or val/)

Hidden files and files that are not pictures are skipped, counted and named; so are folders beside
train/ and test/.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nofuss.data.collection import TEST, TRAIN, Collection, compact_labels, printable, relative
from nofuss.data.decode import SUFFIXES
from nofuss.data.labelling import (
    BY_FOLDER,
    SPLIT_WORDS,
    Labelling,
    PassedOver,
    suggested_pattern,
)
from nofuss.errors import DataError

_HEIC = "HEIC files, for which pip install 'nofuss[heif]' is needed,"
_UNREAD = {
    ".avif": "AVIF files, for which Pillow 11.3 or newer is needed,",
    **dict.fromkeys((".heic", ".heif"), _HEIC),
}
"""Why pictures with these suffixes are skipped where they are not in SUFFIXES."""


def open_folder(folder: Path, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open the pictures below `folder`, labelled by the folder that contains each."""
    passed_over = PassedOver(folder)
    pictures = sorted(_walk(folder, passed_over), key=os.fsencode)
    if not pictures:
        skipped = "".join(f"; {note}" for note in passed_over.notes())
        raise DataError(
            f"{printable(folder)} holds no pictures; expected a folder of class folders with "
            f"JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF files{skipped}"
        )
    sides = _sides(folder, pictures, passed_over)
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
        passed_over.add("pictures that --label-pattern does not match", *loose)
    elif loose:
        passed_over.add("pictures outside any class folder", *loose)
    labels, names = compact_labels([os.fsencode(label) for _, label, _ in labelled])
    layout = "folder of class folders"
    if sides.folders:
        layout = f"class folders in {' and '.join(sides.folders)}"
    paths = [picture for picture, _, _ in labelled]
    return Collection(
        name=folder.name,
        layout=layout + labelling.describe(),
        kind="pictures",
        paths=paths,
        root=folder,
        labels=labels,
        class_names=tuple(printable(os.fsdecode(name)) for name in names),
        split=np.array([side for _, _, side in labelled]) if sides.folders else None,
        notes=(*passed_over.notes(), *_depth_note(labelled, labelling)),
        passed_over=passed_over.listed(),
    )


class _Sides(NamedTuple):
    """The pictures in train/ and test/, and these folders; all pictures where there are none."""

    pictures: list[Path]
    folders: list[str]


def _sides(folder: Path, pictures: list[Path], passed_over: PassedOver) -> _Sides:
    """Recognise train/ and test/ (or val/); pass over what lies beside them, in words."""
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
        passed_over.add(beside, *by_top[name])
    loose = [p for p in pictures if p.parent == folder]
    if loose:
        passed_over.add("pictures outside any class folder", *loose)
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
    return sorted(_walk(folder, PassedOver(folder)), key=os.fsencode)


def _walk(top: Path, passed_over: PassedOver) -> Iterator[Path]:
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
            passed_over.add("unreadable folders", folder)
            continue
        holds_pictures = holds_folders = False
        for entry in entries:
            suffix = Path(entry.name).suffix.lower()
            if entry.name.startswith("."):
                passed_over.add("hidden files", entry.path)
            elif os.path.isdir(entry.path):  # unlike entry.is_dir(), no error on a link to itself
                holds_folders = True
                (links if entry.is_symlink() else folders).append(Path(entry.path))
            elif not os.path.isfile(entry.path):
                # a pipe would block forever
                passed_over.add("broken links and special files", entry.path)
            elif suffix in SUFFIXES:
                holds_pictures = True
                yield Path(entry.path)
            else:
                passed_over.add(_UNREAD.get(suffix, "files that are not pictures"), entry.path)
        if not holds_pictures and not holds_folders:
            passed_over.add("folders without pictures", folder)
