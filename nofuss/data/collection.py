"""A `Collection`: items (files, arrays or vectors), what class each has, and how they are split.

Every reader in this folder returns one; samplers, loader and training take one.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nofuss.cache import key_of
from nofuss.data.columns import Column
from nofuss.data.items import content_keys, file_of
from nofuss.data.triplets import NO_LABEL, Comparisons
from nofuss.errors import DataError, visible
from nofuss.files import Bytes, array_bytes, digest

Labels = NDArray[np.int64]

TRAIN, TEST = "train", "test"
QUERY, GALLERY = "query", "gallery"
"""The two parts of a test set in which queries search the gallery."""


def compact_labels(labels: ArrayLike) -> tuple[Labels, NDArray[Any]]:
    """Renumber labels to 0…C−1 without gaps; also return the old label of each new one, sorted.

    >>> compact_labels([7, 3, 7])
    (array([1, 0, 1]), array([3, 7]))
    """
    values, compact = np.unique(np.asarray(labels), return_inverse=True)
    return compact.reshape(-1).astype(np.int64), values


def printable(path: Path | str) -> str:
    """Return a file name for a message or a JSON file, whatever bytes it is made of."""
    return visible(to_bytes(path).decode("utf-8", "backslashreplace"))


def to_bytes(text: Path | str) -> bytes:
    """Return the bytes of a file name or a label; half a pair of surrogates becomes an escape."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return str(text).encode("utf-8", "backslashreplace")


@dataclass(frozen=True, eq=False, kw_only=True)
class Collection:
    """Items of one kind with their labels; pictures are read only when they are needed."""

    name: str
    """The name of the folder or file."""
    layout: str
    """The recognised layout, in words: "official CUB layout"."""
    paths: Sequence[Path] = ()
    """Of pictures in files; other items are in `array` or in `dataset`."""
    root: Path | None = None
    """The folder that names in messages are relative to."""
    array: NDArray[Any] | None = None
    """Vectors, float32 (N, D), or images, uint8 (N, H, W) or (N, H, W, 3)."""
    dataset: Any = None
    """A torch Dataset of (input, label) pairs, see `from_dataset`."""
    labels: Labels = field(default=None)  # type: ignore[arg-type]  # left out: no item has one
    """(N,) of 0…C−1 without gaps, −1 for an item without a label."""
    class_names: tuple[str, ...] = ()
    labelling: object = None
    """How labels were read from paths, a `Labelling` of readers/folder.py; None for others."""
    split: NDArray[np.str_] | None = None
    """(N,) of "train" and "test", if the data have a split; test items may be "query" and
    "gallery"."""
    comparisons: Comparisons | None = None
    """What is known of items beside or instead of labels."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Further columns of a table; training does not see them."""
    by_links: bool = False
    """Whether labels number groups of linked items instead of classes, see `triplets.py`."""
    remarks: tuple[str, ...] = ()
    """What was corrected while reading, or might be, for the user."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Name of each file that is not used, and the reason in the plural, as in "hidden files"."""

    def __post_init__(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "labels", np.full(len(self), NO_LABEL, dtype=np.int64))
        for values in (self.labels, self.split):
            assert values is None or values.shape == (len(self),)
        assert self.labels.dtype == np.int64
        if len(self):
            assert NO_LABEL <= self.labels.min() <= self.labels.max() < len(self.class_names)

    def __len__(self) -> int:
        if self.array is not None:
            return len(self.array)
        return len(self.paths if self.dataset is None else self.dataset)

    @property
    def vectors(self) -> NDArray[np.float32] | None:
        """The array (N, D), where the items are vectors."""
        return self.array if self.array is not None and self.array.ndim == 2 else None

    @property
    def images(self) -> NDArray[np.uint8] | None:
        """The array, where the items are pictures in one."""
        return self.array if self.array is not None and self.array.ndim > 2 else None

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 without labels."""
        return len(self.class_names)

    @cached_property
    def is_labelled(self) -> bool:
        """Whether any item has a label: a class, or a group of linked items."""
        return bool(len(self)) and int(self.labels.max()) != NO_LABEL

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes: items of two groups may belong to one."""
        return self.is_labelled and not self.by_links

    def known_labels(self) -> Labels:
        """Return the labels for training or scoring, where every item needs one."""
        assert NO_LABEL not in self.labels, "numpy would take −1 for the last class"
        return self.labels

    @property
    def has_pictures(self) -> bool:
        """Whether the items can be shown: files or arrays of pictures."""
        return bool(self.paths) or self.images is not None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each item in messages: its relative path, or "row 17"."""
        if not self.paths:
            return tuple(f"row {i}" for i in range(len(self)))
        return tuple(printable(relative(path, self.root)) for path in self.paths)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: what was skipped, and the remarks."""
        return skipped_notes(self.skipped) + self.remarks

    def describe(self) -> str:
        """Return one line for the user: "200 classes, 11,788 images, official CUB layout"."""
        items = f"{len(self):,} images"
        if self.vectors is not None:
            items = f"{len(self):,} vectors of {self.vectors.shape[1]:,} dimensions"
        parts = [f"{self.num_classes:,} classes" if self.has_classes else "no labels"]
        if self.comparisons is not None:
            parts.append(f"{len(self.comparisons):,} {self.comparisons.kind}")
        unlabelled = int((self.labels == NO_LABEL).sum())
        beside = f"; {unlabelled:,} without a label" if self.has_classes and unlabelled else ""
        return ", ".join([*parts, items, self.layout]) + beside

    def subset(self, indices: ArrayLike) -> "Collection":
        """Return these items in this order; labels are renumbered without the classes left out.

        Triplets and pairs are kept if all of their items are. Where no item has a label, the names
        stay: they only count classes then.
        """
        index, dataset = np.asarray(indices, dtype=np.int64).reshape(-1), self.dataset
        if dataset is not None:
            from torch.utils.data import Subset

            dataset = Subset(dataset, index.tolist())
        labels, names = self.labels[index], self.class_names
        if self.is_labelled:
            has_label = labels != NO_LABEL
            labels[has_label], kept = compact_labels(labels[has_label])
            names = tuple(self.class_names[i] for i in kept)
        return replace(
            self,
            paths=[self.paths[int(i)] for i in index] if self.paths else (),
            array=None if self.array is None else self.array[index],
            dataset=dataset,
            labels=labels,
            class_names=names,
            split=None if self.split is None else self.split[index],
            comparisons=self.comparisons and self.comparisons.subset(index, len(self)),
            columns={name: column.subset(index) for name, column in self.columns.items()},
        )

    def keys(self) -> list[bytes] | None:
        """Return a digest of each item's content, b"" where it can't be read.

        None for a dataset, whose content is not known beforehand.
        """
        if self.array is not None:
            shape = f"{self.array.dtype}{self.array.shape[1:]}".encode()
            return [key_of(shape, array_bytes(row)) for row in self.array]
        return content_keys(self.paths) if self.dataset is None else None

    def fingerprint(self) -> str:
        """Return a digest of layout, item names and sizes, labels and split.

        It does not depend on where the data lie on the disk, nor on the pictures' content (but on
        their sizes in bytes); arrays are hashed whole.
        """
        return digest(*self._identity())

    def _identity(self) -> Iterator[Bytes]:
        yield f"{self.layout}\0".encode()
        for path in self.paths:
            yield os.fsencode(relative(path, self.root)) + b"\0"
            yield f"{_size(path)}\0".encode()
        if self.array is not None:
            yield f"{self.array.dtype}{self.array.shape}".encode()
            yield array_bytes(self.array)
        elif self.dataset is not None:
            yield str(len(self)).encode()
        yield "\0".join(self.class_names).encode("utf-8", "backslashreplace")
        yield np.ascontiguousarray(self.labels).tobytes() if self.is_labelled else b"\0"
        yield b"\0" if self.split is None else np.ascontiguousarray(self.split).tobytes()
        if self.comparisons is not None:
            yield self.comparisons.kind.encode()
            yield np.ascontiguousarray(self.comparisons.rows).tobytes()


def from_dataset(dataset: Any, *, labels: ArrayLike | None = None, name: str = "") -> Collection:
    """Return a collection over a torch `Dataset` of (input, label) pairs.

    Labels are taken from `labels`, or from the dataset's `targets` as torchvision has them,
    or by reading the whole dataset once. Pictures (PIL or uint8 arrays) are preprocessed like
    files; float tensors are used as they are.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no length or index; give a map-style Dataset"
        )
    if not len(dataset):
        raise DataError(f"{type(dataset).__name__} is empty")
    if labels is None:
        labels = getattr(dataset, "targets", None)
    if labels is None:  # numbers, tensors of one number, or words
        found = (dataset[i][1] for i in range(len(dataset)))
        labels = [label if isinstance(label, str) else int(label) for label in found]
    compact, values = compact_labels(np.asarray(labels))
    if len(compact) != len(dataset):
        raise DataError(f"{len(compact):,} labels for a dataset of {len(dataset):,} items")
    names = getattr(dataset, "classes", None)
    if names is None or values.dtype.kind not in "iu" or values[0] < 0 or values[-1] >= len(names):
        names = {value: value for value in values.tolist()}
    return Collection(
        name=name or type(dataset).__name__,
        layout=f"torch dataset {type(dataset).__name__}",
        dataset=dataset,
        labels=compact,
        class_names=tuple(str(names[value]) for value in values.tolist()),
    )


def relative(path: Path, root: Path | None) -> Path:
    """Return `path` relative to `root` where it lies below it, else unchanged."""
    return path.relative_to(root) if root is not None and path.is_relative_to(root) else path


def skipped_notes(skipped: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a line a reason: the number of names with it, and the first five."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped:
        by_reason[reason].append(name)
    return tuple(
        f"{len(names):,} {reason} skipped: {first_five(sorted(names))}"
        for reason, names in by_reason.items()
    )


def first_five(complaints: Sequence[str]) -> str:
    """Join the first five complaints, with their number: "row 3: …; row 9: … (7 in all)"."""
    shown = "; ".join(complaints[:5])
    return shown if len(complaints) <= 5 else f"{shown}; … ({len(complaints):,} in all)"


def refuse(file: Path, complaints: Sequence[str]) -> None:
    """Raise DataError if there are complaints of rows of a table."""
    if complaints:
        raise DataError(f"{file.name} has rows that can't be used: {first_five(complaints)}")


@contextmanager
def reading(file: Path, kind: str) -> Iterator[None]:
    """Raise DataError in one line for whatever a parser raises on bytes from outside."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"{file} needs pyarrow; pip install 'nofuss[parquet]'") from error
    except MemoryError as error:
        raise DataError(f"{file} does not fit into memory") from error
    except Exception as error:  # parsers have many, and an OSError its reason in strerror
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        line = " ".join(reason.split())
        raise DataError(f"{file} is not a readable {kind}: {line}") from error


def _size(path: Path) -> int:
    try:
        return file_of(path).stat().st_size
    except OSError:
        return -1
