"""The index in a folder of the run, or of arrays in Python: in memory, searched exactly.

    vectors-SHA.safetensors   vectors (N, D) float32 unit, label codes (N,), −1 for none
    items-SHA.json            names, class names, columns, sources, where each item is from
    features-SHA.safetensors  unit features (S, F) float16 of a sample, and its rows (S,)

model/manifest.py says how these, and what feedback changes, are put in force together. Whatever is
read is checked as if a stranger had made it.
"""

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import filelock
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nofuss.data.columns import Column, Type, Value, as_column, cells_of
from nofuss.errors import RunError
from nofuss.files import LOCK, load_tensors, memory, parse_json, read_bytes, tensor_bytes
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.model.manifest import (
    Manifest,
    clear,
    mapped,
    read_in_force,
    read_manifest,
    write_manifest,
)
from nofuss.model.saved import model_digest
from nofuss.ranking.neighbours import nearest
from nofuss.search.filter import LABEL, Coded, Condition, as_mask, encode, parse_filter
from nofuss.search.index import (
    SAMPLED,
    SPLITS,
    About,
    Hits,
    Item,
    are_unit,
    first_drawn,
    is_value,
    key_of,
    number_of,
    vectors_of,
)

PYTHON = "Python"
"""The source of items that were not read from files."""
_PARSED = 24  # how many times its size a JSON file may take in memory when it is parsed
_Made = TypeVar("_Made")


class FolderIndex:
    """Vectors that are searched by Euclidean distance on the unit sphere: 0 equal, 2 opposite.

    Vectors are scaled to unit length when they are put, and so are queries. `names`, `labels` and
    `vectors` have one order, that of the items; equal distances are ordered by it. What is put is
    embedded by the model as it was trained; what is searched are these vectors after the map that
    feedback taught, if any.
    """

    def __init__(self, about: About, folder: Path | None = None) -> None:
        self.about, self.folder = about, folder
        self.place = "memory" if folder is None else str(folder)
        self.manifest = Manifest(about.model)
        self.matrix: Tensor | None = None
        self._items: list[Item] = []  # without their vectors, which are the rows of `base`
        self._rows: dict[str, int] = {}
        self._base = torch.empty(0, about.dim)
        self._new: list[tuple[list[int], Tensor]] = []  # rows that are not in _base yet
        self._derived: dict[str, Any] = {}  # what follows from the items
        self._is_saved = False  # but for the map

    @classmethod
    def build(
        cls,
        vectors: Array,
        *,
        names: Sequence[object],
        labels: Sequence[object] | None = None,
        columns: Mapping[str, Column | Sequence[Any]] | None = None,
        model: str = "",
    ) -> "FolderIndex":
        """Build an index of vectors (N, D); names and labels are kept as text.

        `columns` are what filters see: {"price": [9.5, None, …], "shop": ["north", …]}.
        """
        x, given = unit(vectors), [None] * len(names) if labels is None else labels
        if not len(x) == len(names) == len(given):
            got = f"{len(x)} vectors, {len(names)} names and {len(given)} labels"
            raise ValueError(f"got {got}; expected as many of each")
        table = {name: as_column(column) for name, column in (columns or {}).items()}
        for name, column in table.items():
            if len(column.values) != len(x):
                raise ValueError(f"{len(column.values)} values of {name} for {len(x)} items")
        types = {name: column.type for name, column in table.items()}
        index = cls(About(model, x.shape[1], {PYTHON: types} if types else {}))
        labelled = [None if label is None else str(label) for label in given]
        items = [
            Item(str(name), label, cells_of(table, row))
            for row, (name, label) in enumerate(zip(names, labelled, strict=True))
        ]
        index._put(items, x, [True] * len(x))
        return index

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __repr__(self) -> str:
        return f"Index({len(self):,} vectors of {self.about.dim} dimensions)"

    @property
    def names(self) -> list[str]:
        """Names of the items."""
        return self._once("names", lambda: [item.name for item in self._items])

    @property
    def labels(self) -> list[str | None]:
        """Labels of the items; None without."""
        return self._once("labels", lambda: [item.label for item in self._items])

    @property
    def classes(self) -> list[str]:
        """Different labels, sorted."""
        return self._once("classes", lambda: sorted({c for c in self.labels if c is not None}))

    @property
    def codes(self) -> NDArray[np.int64]:
        """(N,) the place of each label in `classes`; −1 for none."""

        def find() -> NDArray[np.int64]:
            place: dict[str | None, int] = {label: i for i, label in enumerate(self.classes)}
            return np.array([place.get(label, -1) for label in self.labels], np.int64)

        return self._once("codes", find)

    @property
    def base(self) -> Tensor:
        """(N, D) unit, by the model as it was trained."""
        if self._new:
            base = torch.empty(len(self), self.about.dim)
            base[: len(self._base)] = self._base
            for rows, x in self._new:
                base[rows] = x
            self._base, self._new = base, []
        return self._base

    @property
    def vectors(self) -> Tensor:
        """(N, D) unit, in force: after what feedback taught."""
        return self._once("vectors", lambda: mapped(self.base, self.matrix))

    def count(self) -> int:
        """Return how many items there are."""
        return len(self)

    def search(
        self, vectors: Array, k: int = 10, *, where: Condition | str | None = None
    ) -> list[Hits]:
        """Return the k nearest of each vector (Q, D), or all items if there are fewer.

        Vectors are those that `nofuss.load(RUN)` gives: after what feedback taught, if anything.
        `where` is a filter over the columns and `label`: "price<20 and shop=='north'".
        """
        if k < 1:
            raise ValueError(f"k is {k}; expected 1 or more")
        q = self._unit(vectors)
        where = parse_filter(where, self.about.types) if isinstance(where, str) else where
        if where is None:
            distances, rows = nearest(q, self.vectors, k)
        else:
            passing = torch.from_numpy(np.flatnonzero(as_mask(where, self._coded)))
            distances, places = nearest(q, self.vectors[passing], k)
            rows = passing[places]
        found = zip(rows.tolist(), distances.tolist(), strict=True)
        return [Hits([self._items[row].name for row in some], far) for some, far in found]

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""
        return [self._item(self._rows[name], vectors) for name in names if name in self._rows]

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key; None if there is none."""
        return self._once("keys", lambda: {key_of(name): name for name in self._rows}).get(key)

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source."""
        for row, item in enumerate(self._items):
            if source in (None, item.source):
                yield self._item(row, vectors)

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of the `count` items that are drawn first, in the order of the items."""
        keys = self._once(
            "numbers", lambda: np.array([number_of(name) for name in self._rows], np.uint64)
        )
        # Unsigned numbers go round at 2**64; the last 63 bits do at 2**63.
        place = (keys - np.uint64(first_drawn(seed))) & np.uint64(2**63 - 1)
        return [self._items[row].name for row in np.sort(place.argsort()[:count]).tolist()]

    def put(self, items: Sequence[Item]) -> None:
        """Write items, replacing those of the same name; without a vector, the former one stays."""
        x = self._unit(vectors_of(items, self.about.dim))
        self._put(items, x, [item.vector is not None for item in items])

    def _put(self, items: Sequence[Item], x: Tensor, is_given: Sequence[bool]) -> None:
        """Write items; x are the unit vectors of those that are given one."""
        self._check(items, is_given)
        rows = list[int]()
        for item, given in zip(items, is_given, strict=True):
            row = self._rows.setdefault(item.name, len(self._items))
            if given:
                rows.append(row)
            else:
                item = item._replace(features=self._items[row].features)
            self._items[row : row + 1] = [
                item if item.vector is None else item._replace(vector=None)
            ]
        if rows:
            self._new.append((rows, x))
        self._note_change()

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        gone = {self._rows[name] for name in names if name in self._rows}
        if gone:
            kept = [row for row in range(len(self)) if row not in gone]
            self._base, self._items = self.base[kept], [self._items[row] for row in kept]
            self._rows = {item.name: row for row, item in enumerate(self._items)}
            self._note_change()

    def _note_change(self) -> None:
        self._derived, self._is_saved = {}, False

    def _once(self, name: str, make: Callable[[], _Made]) -> _Made:
        """Return what follows from the items, made at most once until they change."""
        if name not in self._derived:
            self._derived[name] = make()
        made: _Made = self._derived[name]
        return made

    def _unit(self, vectors: Array) -> Tensor:
        x = unit(vectors)
        if x.shape[1] != self.about.dim:
            got = f"got vectors of {x.shape[1]} dimensions"
            raise ValueError(f"{got}; the index has {self.about.dim}")
        return x

    def _check(self, items: Sequence[Item], is_given: Sequence[bool]) -> None:
        """Refuse what would leave the index inconsistent, before anything is changed."""
        types = self.about.types
        for name, count in Counter(item.name for item in items).items():
            if count > 1:
                raise ValueError(f"the index would hold {name!r} twice; names are unique")
        for item, given in zip(items, is_given, strict=True):
            if not given and item.name not in self._rows:
                raise ValueError(f"{item.name!r} is new to the index, so it needs a vector")
            for name, value in item.columns.items():
                if name == LABEL:
                    raise ValueError("a column can't be called label; rename it")
                if not is_value(value, types.get(name)):
                    known = f"is {types[name]} in the index" if name in types else "has no type yet"
                    raise ValueError(f"column {name} {known}, and {item.name!r} has {value!r:.40}")

    def _item(self, row: int, vectors: bool) -> Item:
        if vectors:
            return self._items[row]._replace(vector=self.base[row])
        return self._items[row]._replace(features=None)

    def _coded(self, column: str) -> Coded:
        if column == LABEL:
            return Coded(self.codes, self.classes)
        values = (item.columns.get(column) for item in self._items)
        return self._once(f"column {column}", lambda: encode(values))

    def with_map(self, matrix: Tensor | None) -> "FolderIndex":
        """Return a copy in which feedback taught this map (D, D), or nothing."""
        return self._copy("vectors", matrix=matrix)

    def with_labels(self, labels: Mapping[str, str]) -> "FolderIndex":
        """Return a copy in which some items have other labels; it is not to be written."""
        if not labels:
            return self
        index = self._copy("labels", "classes", "codes")
        for name, label in labels.items():
            row = self._rows[name]
            index._items[row] = self._items[row]._replace(label=label)
        return index

    def _copy(self, *stale: str, **changes: Any) -> "FolderIndex":
        """Return a copy with other attributes, and without what would follow from the former."""
        index = copy.copy(self)
        index._base, index._new = self.base, []
        index._items, index._rows = list(self._items), dict(self._rows)
        index._derived = {n: made for n, made in self._derived.items() if n not in stale}
        index.__dict__ |= changes
        return index

    # On disk

    def commit(self, about: About, *, source: str | None = None) -> None:
        """Put `about` in force and write the index into its folder, if it has one.

        source: of use to databases only; here nobody else writes, as the caller has the run's lock.
        """
        if about.sources != self.about.sources:  # columns may be gone, or of another type
            types = about.types
            for row, item in enumerate(self._items):
                known = {n: v for n, v in item.columns.items() if is_value(v, types.get(n))}
                self._items[row] = item._replace(columns=known)
            self._note_change()
        self.about = about
        if self.folder is not None:
            self._write(self.folder)

    def _write(self, folder: Path) -> None:
        """Write what differs from the disk and put it in force."""
        before = read_manifest(folder, self.about.model)
        if (before.version if before else 0) != self.manifest.version:
            raise RunError(f"another command has changed the index in {folder}; try again")
        matrix = None if self.matrix is None else tensor_bytes({"map": self.matrix})
        parts = {"map": matrix} | ({} if self._is_saved else self._contents())
        manifest = dataclasses.replace(self.manifest, about=self.about.as_dict())
        self.manifest, self._is_saved = write_manifest(folder, manifest, parts), True
        clear(folder)

    def _contents(self) -> dict[str, bytes | None]:
        """Return the items as the contents of files."""
        items = {
            "names": self.names,
            "classes": self.classes,
            "columns": {
                name: [item.columns.get(name) for item in self._items]
                for name in self.about.types
                if name != LABEL
            },
            "origins": [(item.source, item.digest) for item in self._items],
            "splits": [item.split for item in self._items],
            "sources": self.about.sources,
        }
        described = json.dumps(items).encode()  # escaped: names may hold bytes that are no UTF-8
        if len(described) > memory() // _PARSED:  # as when it is read
            raise RunError(
                f"this machine's memory is too small for the names and columns of {len(self):,} "
                "items; put them into a database: nofuss index RUN DIR --to URL"
            )
        drawn = [self._rows[name] for name in self.sample(SAMPLED)]
        known = {row: x for row in drawn if (x := self._items[row].features) is not None}
        features = None
        if known:
            rows = torch.tensor(list(known))
            features = tensor_bytes({"features": torch.stack([*known.values()]), "rows": rows})
        return {
            "vectors": tensor_bytes({"vectors": self.base, "labels": self.codes}),
            "items": described,
            "features": features,
        }

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder, replacing the one in it as a whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / LOCK):  # of two writers one waits for the other
            before = read_manifest(folder, self.about.model)
            version = before.version if before else 0
            manifest = dataclasses.replace(self.manifest, version=version, files={})
            self._copy(manifest=manifest, _is_saved=False)._write(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "FolderIndex":
        """Load the index of a run (RUN/index), or one that `save` wrote; every byte is checked."""
        folder = Path(folder)
        is_of_run = (folder.parent / "model" / "model.json").is_file()
        return cls.open(folder, model_digest(folder.parent / "model") if is_of_run else "")

    @classmethod
    def open(cls, folder: Path, model: str, dim: int = 0, *, create: bool = False) -> "FolderIndex":
        """Open what is in force for a model in a folder; RunError where there is none.

        dim: what the model gives, if known. create: return an empty index where there is none.
        """
        index = read_in_force(folder, model, lambda manifest: cls._read(folder, manifest, dim))
        if index is not None:
            return index
        if create:
            return cls(About(model, dim), folder)
        others = any(folder.glob("*.json"))
        why = "the one there is of another model" if others else "nothing is there"
        raise RunError(f"no index in {folder} ({why}); make one: nofuss index RUN DIR")

    @classmethod
    def _read(cls, folder: Path, manifest: Manifest, dim: int) -> "FolderIndex":
        """Return what the files of a manifest hold; any error means that they are damaged."""
        items = read_bytes(manifest.checked(folder, "items"), limit=memory() // _PARSED)
        stored = parse_json(items)
        about = About.from_dict(manifest.about, stored["sources"])
        names, classes, splits = (stored[what] for what in ("names", "classes", "splits"))
        tensors, _ = load_tensors(manifest.checked(folder, "vectors"))
        vectors, codes = tensors["vectors"], tensors["labels"]
        features, rows = torch.empty(0, 0).half(), torch.empty(0)
        if "features" in manifest.files:
            tensors, _ = load_tensors(manifest.checked(folder, "features"))
            features, rows = tensors["features"], tensors["rows"]
        origins = [(source, content) for source, content in stored["origins"]]
        are_sound = {
            "model": about.model == manifest.model and dim in (0, about.dim),
            "names": _are_unique_strings(names),
            "classes": _are_unique_strings(classes),
            "origins": all(type(part) is str for origin in origins for part in origin),
            "splits": {*splits} <= {None, *SPLITS},
            "vectors": vectors.dtype == torch.float32
            and vectors.shape == (len(names), about.dim)
            and are_unit(vectors),
            "labels": codes.dtype == torch.int64
            and codes.shape == (len(names),)
            and bool(((codes >= -1) & (codes < len(classes))).all()),
            "features": features.dtype == torch.float16
            and features.ndim == 2
            and are_unit(features.float()),
        }
        if wrong := [what for what, is_sound in are_sound.items() if not is_sound]:
            raise ValueError(f"nofuss did not write its {', '.join(wrong)}")
        index = cls(about, folder)
        index.manifest, index.matrix = manifest, manifest.read_map(folder, about.dim)
        labels = [None if code < 0 else classes[code] for code in codes.tolist()]
        cells = _cells(stored["columns"], about.types, len(names))
        described = zip(names, labels, cells, origins, splits, strict=True)
        of = dict(zip(rows.tolist(), features, strict=True))
        index._items = [
            Item(name, label, columns, *origin, None, split, of.get(row))
            for row, (name, label, columns, origin, split) in enumerate(described)
        ]
        index._rows = {name: row for row, name in enumerate(names)}
        index._base, index._is_saved = vectors, True
        return index


def unit(vectors: Array) -> Tensor:
    """Return float32 directions (N, D) in this process's memory; refuse NaN and infinity."""
    x = as_tensor(vectors)
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"got vectors of shape {tuple(x.shape)}; expected (N, D)")
    x = normalize(x.detach().to("cpu", torch.float32)).contiguous()
    if not x.isfinite().all():
        raise ValueError("vectors hold NaN, infinity or lengths over 1e19; drop those rows first")
    return x


def _are_unique_strings(values: Any) -> bool:
    are_strings = isinstance(values, list) and all(type(value) is str for value in values)
    return are_strings and len(set(values)) == len(values)


def _cells(columns: Any, types: Mapping[str, Type], length: int) -> list[dict[str, Value]]:
    """Return the columns of each item, after a look at each value."""
    cells: list[dict[str, Value]] = [{} for _ in range(length)]
    for name, values in columns.items():
        for item, value in zip(cells, values, strict=True):
            if value is not None:
                if not is_value(value, types[name]):
                    raise ValueError(f"column {name!r:.40} holds a value that is not {types[name]}")
                item[name] = value
    return cells
