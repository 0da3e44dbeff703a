"""The paper's three benchmarks in their official layouts, with the paper's splits.

    CUB-200-2011              images.txt, image_class_labels.txt, images/     first 100 / last 100
    Cars196                   cars_annos.mat and car_ims/, or the devkit's    first 98 / last 98
                              cars_train_annos.mat, cars_test_annos_withlabels.mat
    Stanford Online Products  Ebay_train.txt, Ebay_test.txt                   as those two files say

The splits are by class (zero-shot): train_test_split.txt of CUB and the test flag of Cars196
split *images* of the same classes, and are not used.
"""

import os
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from nofuss.data.collection import (
    TEST,
    TRAIN,
    Collection,
    compact_labels,
    first_five,
    reading,
    refuse,
)
from nofuss.errors import DataError
from nofuss.files import read_bytes

DEVKIT = {"cars_train_annos.mat": "cars_train", "cars_test_annos_withlabels.mat": "cars_test"}
"""Annotations of Cars196 as published → the folder of their pictures."""


def layout_of(folder: Path) -> Callable[[Path], Collection] | None:
    """Return the reader for an official layout, or None if the folder has none."""
    if (folder / "images.txt").is_file() and (folder / "image_class_labels.txt").is_file():
        return open_cub
    if any(_mat_file(folder, name) for name in ("cars_annos.mat", *DEVKIT)):
        return open_cars
    if (folder / "Ebay_train.txt").is_file() and (folder / "Ebay_test.txt").is_file():
        return open_products
    return None


def open_cub(folder: Path) -> Collection:
    """Open CUB-200-2011: images.txt "id path", image_class_labels.txt "id class", classes.txt."""
    path_of = dict(_lines(folder / "images.txt", (int, str)))
    class_of = dict(_lines(folder / "image_class_labels.txt", (int, int)))
    names = folder / "classes.txt"
    if unlabelled := sorted(path_of.keys() - class_of.keys()):
        missing = first_five([str(i) for i in unlabelled])
        raise DataError(f"image_class_labels.txt has no class for the images {missing}")
    ids = sorted(path_of)
    return _collection(
        folder,
        layout="official CUB layout",
        paths=[folder / "images" / path_of[i] for i in ids],
        classes=[class_of[i] for i in ids],
        names=dict(_lines(names, (int, str))) if names.is_file() else {},
    )


def open_cars(folder: Path) -> Collection:
    """Open Cars196: annotations of all images in one .mat file, or in the devkit's two."""
    wanted = {"cars_annos.mat": ""} if _mat_file(folder, "cars_annos.mat") else DEVKIT
    paths, classes, names = list[Path](), list[int](), dict[int, str]()
    for name, pictures in wanted.items():
        content = _load_mat(folder, name)
        try:
            for row in np.atleast_1d(content["annotations"]):
                picture = row["relative_im_path"] if "relative_im_path" in row else row["fname"]
                paths.append(folder / pictures / str(picture))
                classes.append(int(row["class"]))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise DataError(
                f"{name} lacks annotations with a class and a file name; "
                "for the test images, the file is cars_test_annos_withlabels.mat"
            ) from error
        names |= _class_names(content)
    if not names and _mat_file(folder, "cars_meta.mat"):
        names = _class_names(_load_mat(folder, "cars_meta.mat"))
    layout = "official Cars196 layout"
    return _collection(folder, layout=layout, paths=paths, classes=classes, names=names)


def open_products(folder: Path) -> Collection:
    """Open Stanford Online Products: "image_id class_id super_class_id path", a file a side."""
    columns = (int, int, int, str)
    sides = {TRAIN: folder / "Ebay_train.txt", TEST: folder / "Ebay_test.txt"}
    rows = [
        (side, class_id, path)
        for side, file in sides.items()
        for _, class_id, _, path in _lines(file, columns, skip=1)
    ]
    return _collection(
        folder,
        layout="official Stanford Online Products layout",
        paths=[folder / path for *_, path in rows],
        classes=[class_id for _, class_id, _ in rows],
        names={},
        split=[side for side, *_ in rows],
    )


def _collection(
    folder: Path,
    *,
    layout: str,
    paths: Sequence[Path],
    classes: Sequence[int],
    names: dict[int, str],
    split: Sequence[str] | None = None,
) -> Collection:
    """Return the collection; without a split, the first half of the classes is for training."""
    if not paths:
        raise DataError(f"{folder} has an {layout} but lists no images")
    if missing := [str(path) for path in paths if not os.path.isfile(path)]:
        raise DataError(
            f"{len(missing):,} of {len(paths):,} images are missing: {first_five(missing)}"
        )
    labels, ids = compact_labels(classes)
    if split is None:
        split = [TRAIN if label < len(ids) // 2 else TEST for label in labels]
    return Collection(
        name=folder.name,
        layout=layout,
        paths=paths,
        root=folder,
        labels=labels,
        class_names=tuple(names.get(int(i), str(i)) for i in ids),
        split=np.array(split),
    )


def _lines(file: Path, columns: tuple[type, ...], *, skip: int = 0) -> list[tuple[Any, ...]]:
    """Read space-separated columns of a text file; the last column may contain spaces."""
    rows, complaints = list[tuple[Any, ...]](), list[str]()
    with reading(file, "text"):
        text = read_bytes(file).decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.split("\n")[skip:], start=1 + skip):
        cells = line.strip().split(maxsplit=len(columns) - 1)
        if not cells:
            continue
        try:
            rows.append(tuple(column(c) for column, c in zip(columns, cells, strict=True)))
        except ValueError:
            complaints.append(f"line {number}: {line.strip()[:80]!r}")
    refuse(file, complaints)
    return rows


def _mat_file(folder: Path, name: str) -> Path | None:
    """Return where an annotation file of Cars196 is; None if there is none."""
    return next((d / name for d in (folder, folder / "devkit") if (d / name).is_file()), None)


def _load_mat(folder: Path, name: str) -> dict[str, Any]:
    from scipy.io import loadmat

    file = _mat_file(folder, name)
    if file is None:
        raise DataError(
            f"{folder} has no {name}; Cars196 needs both {' and '.join(DEVKIT)}, or cars_annos.mat"
        )
    with reading(file, "MATLAB file"):
        content: dict[str, Any] = loadmat(BytesIO(read_bytes(file)), simplify_cells=True)
    return content


def _class_names(content: dict[str, Any]) -> dict[int, str]:
    """Return class → name of a MATLAB file, where it has names."""
    names = np.atleast_1d(content.get("class_names", []))
    return {number: str(name) for number, name in enumerate(names, start=1)}
