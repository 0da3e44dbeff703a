"""A folder of class folders: the class of a picture is the folder that holds it.

    photos/robin/1.jpg            class "robin"
    photos/birds/wren/1.jpg       class "birds/wren"
    photos/train/robin/1.jpg      class "robin", for training; likewise test/ (or val/)

Hidden files and files that are not pictures are skipped and counted.
"""

import operator
import os
from collections import Counter
from collections.abc import Iterator
from itertools import compress
from pathlib import Path

import numpy as np

from nofuss.data.collection import TEST, TRAIN, Collection, compact_labels, printable, relative
from nofuss.errors import DataError

PICTURE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
)
SPLIT_FOLDERS = {"train": TRAIN, "test": TEST, "val": TEST, "valid": TEST, "validation": TEST}


def open_folder(folder: Path) -> Collection:
    """Open the pictures below `folder`, labelled by the folder that contains each."""
    skipped: Counter[str] = Counter()
    pictures = sorted(_walk(folder, skipped), key=os.fsencode)
    loose = [p for p in pictures if p.parent == folder]
    pictures = [p for p in pictures if p.parent != folder]
    if not pictures:
        where = printable(folder)
        if loose:
            raise DataError(
                f"{where} holds {len(loose):,} pictures but no class folders; put the pictures of "
                "each class into a separate folder, or list them in a CSV with path,label"
            )
        raise DataError(
            f"{where} holds no pictures; expected a folder of class folders with "
            "JPEG, PNG, WebP, BMP, GIF or TIFF files"
        )
    holders = [relative(p.parent, folder) for p in pictures]
    split, layout = None, "folder of class folders"
    tops = {h.parts[0] for h in holders}
    if TRAIN in tops and len(tops) > 1 and tops <= SPLIT_FOLDERS.keys():
        inside = [len(h.parts) > 1 for h in holders]
        loose += compress(pictures, map(operator.not_, inside))
        pictures, holders = [*compress(pictures, inside)], [*compress(holders, inside)]
        if not pictures:
            where = " and ".join(sorted(tops))
            raise DataError(
                f"{printable(folder)} has pictures directly in {where}; put those of "
                "each class into a separate folder there"
            )
        split = np.array([SPLIT_FOLDERS[h.parts[0]] for h in holders])
        layout = f"class folders in {' and '.join(sorted(tops))}"
        holders = [h.relative_to(h.parts[0]) for h in holders]
    if loose:
        skipped["pictures outside any class folder"] = len(loose)
    labels, names = compact_labels([os.fsencode(h) for h in holders])
    return Collection(
        name=folder.name,
        layout=layout,
        kind="pictures",
        paths=pictures,
        root=folder,
        labels=labels,
        class_names=tuple(printable(os.fsdecode(name)) for name in names),
        split=split,
        notes=tuple(f"{count:,} {what} skipped" for what, count in skipped.items()),
    )


def find_pictures(folder: Path) -> list[Path]:
    """Return all picture files below `folder`, sorted, in class folders or not."""
    return sorted(_walk(folder, Counter()), key=os.fsencode)


def _walk(top: Path, skipped: Counter[str]) -> Iterator[Path]:
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
            skipped["unreadable folders"] += 1
            continue
        holds_pictures = holds_folders = False
        for entry in entries:
            if entry.name.startswith("."):
                skipped["hidden files"] += 1
            elif os.path.isdir(entry.path):  # unlike entry.is_dir(), no error on a link to itself
                holds_folders = True
                (links if entry.is_symlink() else folders).append(Path(entry.path))
            elif not os.path.isfile(entry.path):
                skipped["broken links and special files"] += 1  # a pipe would block forever
            elif Path(entry.name).suffix.lower() in PICTURE_SUFFIXES:
                holds_pictures = True
                yield Path(entry.path)
            else:
                skipped["files that are not pictures"] += 1
        if not holds_pictures and not holds_folders:
            skipped["folders without pictures"] += 1
