"""The index in a folder of the run, or of arrays in Python: in memory, searched exactly.

    vectors-SHA.safetensors   vectors (N, D) float32 unit, label codes (N,), −1 for none
    items-SHA.json            names, class names, columns, sources, where each item is from
    features-SHA.safetensors  unit features (S, F) float16 of a sample, and its rows (S,)

model/manifest.py says how these, and what feedback changes, are put in force together. Whatever is
read is checked as if a stranger had made it.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Column, Type, Value, as_column, cells_of
from nofuss.errors import RunError
from nofuss.files import LOCK, load_tensors, memory, parse_json, read_bytes, tensor_bytes
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.model.manifest import (
    MAP,
    Manifest,
    check_files,
    clear,
    damaged,
    mapped,
    read_manifest,
    read_map,
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
    Origin,
    are_unit,
    first_drawn,
    is_value,
    key_of,
)

PYTHON = "Python"
"""The source of items that were not read from files."""
_PARSED = 24  # how many times its size a JSON file may take in memory when it is parsed
_TRIES = 5


class FolderIndex:
    """Vectors that are searched by Euclidean distance on the unit sphere: 0 equal, 2 opposite.

    Vectors are scaled to unit length when they are put, and so are queries. `names`, `labels` and
    `vectors` have one order, that of the items; equal distances are ordered by it. What is put is
    embedded by the model as it was trained; what is searched are these vectors after the map that
    feedback taught, if any.
    """

    def __init__(self, about: About, folder: Path | None = None) -> None:
        self.about, self.folder = about, folder
        self.manifest = Manifest(about.model)
        self.matrix: Tensor | None = None
        self.place = "memory" if folder is None else str(folder)
        self.names: list[str] = []
        self.labels: list[str | None] = []
        self._columns: list[Mapping[str, Value]] = []
        self._origins: list[Origin | None] = []
        self._splits: list[str | None] = []
        self._base = torch.empty(0, about.dim)
        self._is_shared = False  # vectors of a file or of another index, which are not written to
        self._new: list[Tensor] = []
        self._moved: Tensor | None = None
        self._features: dict[str, Tensor] = {}
        self._changed = {"vectors", "items", "features"}
        """The parts that differ from those on disk."""
        self._rows: dict[str, int] = {}
        self._coded: dict[str, Coded] = {}
        self._keys: dict[str, str] = {}
        self._numbers = np.empty(0, np.uint64)  # the keys, to draw from

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
        if LABEL in types:
            raise ValueError("a column can't be called label; rename it")
        index = cls(About(model, x.shape[1], {PYTHON: types} if types else {}))
        index._base, index._origins, index._splits = x, [None] * len(x), [None] * len(x)
        index.names = [str(name) for name in names]
        index.labels = [None if label is None else str(label) for label in given]
        index._columns = [cells_of(table, row) for row in range(len(x))]
        index._rows = {name: row for row, name in enumerate(index.names)}
        _check_unique(index.names)
        return index

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __repr__(self) -> str:
        return f"Index({len(self):,} vectors of {self.about.dim} dimensions)"

    @property
    def base(self) -> Tensor:
        """(N, D) unit, by the model as it was trained."""
        if self._new:
            self._base, self._new = torch.cat([self._base, *self._new]), []
            self._is_shared = False
        return self._base

    @property
    def vectors(self) -> Tensor:
        """(N, D) unit, in force: after what feedback taught."""
        if self.matrix is None:
            return self.base
        if self._moved is None:
            self._moved = mapped(self.base, self.matrix)
        return self._moved

    def count(self) -> int:
        """Return how many items there are."""
        return len(self.names)

    def search(
        self, vectors: Array, k: int = 10, *, where: Condition | str | None = None
    ) -> list[Hits]:
        """Return the k nearest of each vector (Q, D), or all items if there are fewer.

        Vectors are those that `nofuss.load(RUN)` gives: after what feedback taught, if anything.
        `where` is a filter over the columns and `label`: "price<20 and shop=='north'".
        """
        if k < 1:
            raise ValueError(f"k is {k}; expected 1 or more")
        q = unit(vectors)
        if q.shape[1] != self.about.dim:
            got = f"got queries of {q.shape[1]} dimensions; the index has {self.about.dim}"
            raise ValueError(got)
        where = parse_filter(where, self.about.types) if isinstance(where, str) else where
        if where is None:
            distances, rows = nearest(q, self.vectors, k)
        else:
            passing = torch.from_numpy(np.flatnonzero(as_mask(where, self._coded_column)))
            distances, places = nearest(q, self.vectors[passing], k)
            rows = passing[places]
        found = zip(rows.tolist(), distances.tolist(), strict=True)
        return [Hits([self.names[row] for row in some], far) for some, far in found]

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""
        return [self._item(self._rows[name], vectors) for name in names if name in self._rows]

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key; None if there is none."""
        if len(self._keys) != len(self.names):
            self._keys = {key_of(name): name for name in self.names}
        return self._keys.get(key)

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source."""
        for row, origin in enumerate(self._origins):
            if source is None or (origin is not None and origin.source == source):
                yield self._item(row, vectors)

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of the `count` items that are drawn first, in the order of the items."""
        if len(self._numbers) != len(self):
            self._numbers = np.array([int(key_of(name), 16) for name in self.names], np.uint64)
        # Unsigned numbers go round at 2**64; the last 63 bits do at 2**63.
        place = (self._numbers - np.uint64(first_drawn(seed))) & np.uint64(2**63 - 1)
        return [self.names[row] for row in np.sort(place.argsort()[:count]).tolist()]

    def put(self, items: Sequence[Item]) -> None:
        """Write items, replacing those of the same name; without a vector, the former one stays."""
        self._check(items)
        rows = [self._rows.get(item.name, -1) for item in items]
        given = [i for i, item in enumerate(items) if item.vector is not None]
        x = torch.empty(0, self.about.dim)
        if given:
            x = unit(torch.stack([v for item in items if (v := item.vector) is not None]))
        if x.shape[1] != self.about.dim:
            got = f"got vectors of {x.shape[1]} dimensions; the index has {self.about.dim}"
            raise ValueError(got)
        replaced = [at for at, i in enumerate(given) if rows[i] >= 0]
        if replaced:
            base = self.base
            self._base, self._is_shared = base.clone() if self._is_shared else base, False
            self._base[[rows[given[at]] for at in replaced]] = x[replaced]
        if len(replaced) < len(given):
            self._new.append(x[[at for at, i in enumerate(given) if rows[i] < 0]])
        for item, row in zip(items, rows, strict=True):
            facts = (item.label, dict(item.columns), item.origin, item.split)
            if row < 0:
                self._rows[item.name] = len(self.names)
                self.names.append(item.name)
                for values, fact in zip(self._facts, facts, strict=True):
                    values.append(fact)
            else:
                for values, fact in zip(self._facts, facts, strict=True):
                    values[row] = fact
            if item.vector is not None:
                self._features.pop(item.name, None)
            if item.features is not None:
                self._features[item.name] = item.features.half()
        self._note_change()

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        gone = {self._rows[name] for name in names if name in self._rows}
        if not gone:
            return
        kept = [row for row in range(len(self)) if row not in gone]
        self._base, self._is_shared = self.base[kept], False
        for name in names:
            self._features.pop(name, None)
        for values in (self.names, *self._facts):
            values[:] = [values[row] for row in kept]
        self._rows = {name: row for row, name in enumerate(self.names)}
        self._note_change()

    @property
    def _facts(self) -> tuple[list[Any], ...]:
        return self.labels, self._columns, self._origins, self._splits

    def _note_change(self) -> None:
        self._moved, self._numbers = None, np.empty(0, np.uint64)
        self._changed |= {"vectors", "items", "features"}
        self._coded.clear()
        self._keys.clear()

    def _check(self, items: Sequence[Item]) -> None:
        """Refuse what would leave the index inconsistent, before anything is changed."""
        types = self.about.types
        _check_unique([item.name for item in items])
        for item in items:
            if item.vector is None and item.name not in self._rows:
                raise ValueError(f"{item.name!r} is new to the index, so it needs a vector")
            for name, value in item.columns.items():
                if name == LABEL:
                    raise ValueError("a column can't be called label; rename it")
                if not is_value(value, types.get(name)):
                    known = f"is {types[name]} in the index" if name in types else "has no type yet"
                    raise ValueError(f"column {name} {known}, and {item.name!r} has {value!r:.40}")

    def _item(self, row: int, vectors: bool) -> Item:
        vector = self.base[row] if vectors else None
        label, columns, origin, split = (values[row] for values in self._facts)
        features = self._features.get(self.names[row]) if vectors else None
        return Item(self.names[row], label, columns, origin, vector, split, features)

    def _coded_column(self, name: str) -> Coded:
        if name not in self._coded:
            cells = (item.get(name) for item in self._columns)
            self._coded[name] = encode(self.labels if name == LABEL else list(cells))
        return self._coded[name]

    def with_map(self, matrix: Tensor | None) -> "FolderIndex":
        """Return an index of the same items in which feedback taught this map (D, D), or nothing.

        It shares the items with this one, which is not to be changed any more.
        """
        index = FolderIndex(self.about, self.folder)
        index.__dict__ |= self.__dict__
        index.matrix, index._base, index._new, index._moved = matrix, self.base, [], None
        index._is_shared, index._changed = True, self._changed | {MAP}
        return index

    def with_labels(self, labels: Mapping[str, str]) -> "FolderIndex":
        """Return an index of the same items, some of which have other labels.

        It shares the items with this one; neither is to be changed or written any more.
        """
        if not labels:
            return self
        index = FolderIndex(self.about, self.folder)
        index.__dict__ |= self.__dict__
        index.labels, index._coded = list(self.labels), {}
        for name, label in labels.items():
            index.labels[self._rows[name]] = label
        return index

    # On disk

    def commit(self, about: About, *, source: str | None = None) -> None:
        """Put `about` in force and write the index into its folder, if it has one.

        source: of use to databases only; here nobody else writes, as the caller has the run's lock.
        """
        if about.sources != self.about.sources:
            self._changed.add("items")
        if about.types != self.about.types:  # values of columns that have gone, or are of new types
            kept, self._coded = about.types, {}
            self._columns = [
                {name: value for name, value in cells.items() if is_value(value, kept.get(name))}
                for cells in self._columns
            ]
        self.about = about
        if self.folder is not None:
            self._write(self.folder)

    def _write(self, folder: Path) -> None:
        """Write what differs from the disk and put it in force."""
        before = read_manifest(folder, self.about.model)
        if (before.version if before else 0) != self.manifest.version:
            raise RunError(f"another command has changed the index in {folder}; try again")
        parts = {part: self._content(part) for part in self._changed}
        manifest = dataclasses.replace(self.manifest, about=self.about.as_dict())
        self.manifest, self._changed = write_manifest(folder, manifest, parts), set()
        clear(folder)

    def _content(self, part: str) -> bytes | None:
        """Return the content of a part; None for one that there is not."""
        classes = sorted({label for label in self.labels if label is not None})
        match part:
            case "vectors":
                code = {label: i for i, label in enumerate(classes)}
                codes = [-1 if label is None else code[label] for label in self.labels]
                labels = torch.tensor(codes, dtype=torch.int64)
                return tensor_bytes({"vectors": self.base.contiguous(), "labels": labels})
            case "items":
                columns = [name for name in self.about.types if name != LABEL]
                items = {
                    "names": self.names,
                    "classes": classes,
                    "columns": {n: [cells.get(n) for cells in self._columns] for n in columns},
                    "origins": self._origins,
                    "splits": self._splits,
                    "sources": self.about.sources,
                }
                # json.dumps escapes: names may hold bytes that are no UTF-8
                return json.dumps(items).encode()
            case "features":
                drawn = [name for name in self.sample(SAMPLED) if name in self._features]
                self._features = {name: self._features[name] for name in drawn}
                if not drawn:
                    return None
                rows = torch.tensor([self._rows[name] for name in drawn])
                features = torch.stack([*self._features.values()])
                return tensor_bytes({"features": features, "rows": rows})
            case _:
                return None if self.matrix is None else tensor_bytes({"map": self.matrix})

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder, replacing the one in it as a whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / LOCK):  # of two writers one waits for the other
            before = read_manifest(folder, self.about.model)
            copy = self.with_map(self.matrix)
            copy.folder, copy._changed = folder, {"vectors", "items", "features", MAP}
            copy.manifest = dataclasses.replace(
                self.manifest, version=before.version if before else 0, files={}
            )
            copy._write(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "FolderIndex":
        """Load the index of a run (RUN/index), or one that `save` wrote; every byte is checked."""
        folder = Path(folder)
        is_of_run = (folder.parent / "model" / "model.json").is_file()
        return cls.open(folder, model_digest(folder.parent / "model") if is_of_run else "")

    @classmethod
    def open(cls, folder: Path, model: str) -> "FolderIndex":
        """Open what is in force for a model in a folder; RunError where there is none."""
        for last in range(_TRIES):
            try:
                manifest = read_manifest(folder, model)
                if manifest is not None:
                    return cls._read(folder, manifest)
                break
            except FileNotFoundError as error:  # another process has just replaced it
                if last == _TRIES - 1:
                    raise damaged(folder, error) from None
            except Exception as error:  # damaged bytes can make their readers raise anything
                raise damaged(folder, error) from None
        others = any(folder.glob("*.json"))
        why = "the one there is of another model" if others else "nothing is there"
        raise RunError(f"no index in {folder} ({why}); make one: nofuss index RUN DIR")

    @classmethod
    def _read(cls, folder: Path, manifest: Manifest) -> "FolderIndex":
        check_files(folder, manifest)
        items = read_bytes(manifest.file(folder, "items"), limit=memory() // _PARSED)
        stored = parse_json(items)
        names, classes = (_unique_strings(stored[what], what) for what in ("names", "classes"))
        about = About.from_dict(manifest.about, stored["sources"])
        if about.model != manifest.model:
            raise ValueError("its items are of another model")
        tensors, _ = load_tensors(manifest.file(folder, "vectors"))
        vectors, codes = tensors["vectors"], tensors["labels"]
        _check_numbers(vectors, codes, about.dim, len(classes))
        for values in (vectors, stored["origins"], stored["splits"]):
            if len(values) != len(names):
                raise ValueError(f"{len(values)} values for {len(names)} names")
        index = cls(about, folder)
        index.manifest, index.matrix = manifest, read_map(folder, manifest)
        if index.matrix is not None and len(index.matrix) != about.dim:
            raise ValueError(f"its map is of {len(index.matrix)} dimensions, not {about.dim}")
        index._base, index._is_shared, index._changed = vectors, True, set()
        index.names, index._rows = names, {name: row for row, name in enumerate(names)}
        index.labels = [None if code < 0 else classes[code] for code in codes.tolist()]
        index._columns = _cells(stored["columns"], about.types, len(names))
        if "features" in manifest.files:
            tensors, _ = load_tensors(manifest.file(folder, "features"))
            index._features = _features(tensors["features"], tensors["rows"], names)
        index._origins = [_origin(origin, about.sources) for origin in stored["origins"]]
        index._splits = stored["splits"]
        if not isinstance(index._splits, list) or not {*index._splits} <= {None, *SPLITS}:
            raise ValueError("its items are of sides that training does not know")
        return index


def unit(vectors: Array) -> Tensor:
    """Return float32 directions (N, D) in this process's memory; refuse NaN and infinity."""
    x = as_tensor(vectors)
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"got vectors of shape {tuple(x.shape)}; expected (N, D)")
    x = x.detach().to("cpu", torch.float32)
    if not x.isfinite().all():
        raise ValueError("vectors hold NaN or infinity; drop those rows first")
    # Scale by the largest entry first: the squares of 1e20 and 1e-30 are beyond float32.
    largest = x.abs().amax(1, keepdim=True)
    return normalize(x / torch.where(largest > 0, largest, 1.0)).contiguous()


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise ValueError(f"the index would hold {twice!r} twice; names are unique")


def _cells(columns: Any, types: Mapping[str, Type], length: int) -> list[Mapping[str, Value]]:
    """Return the columns of each item, after a look at each value."""
    if not isinstance(columns, dict):
        raise ValueError("columns is not a JSON object")
    cells: list[dict[str, Value]] = [{} for _ in range(length)]
    for name, values in columns.items():
        if name == LABEL or name not in types or not isinstance(values, list):
            raise ValueError(f"{name!r:.40} is not a column")
        for item, value in zip(cells, values, strict=True):
            if value is not None:
                if not is_value(value, types[name]):
                    raise ValueError(f"column {name!r:.40} holds a value that is not {types[name]}")
                item[name] = value
    return list(cells)


def _origin(stored: Any, sources: Mapping[str, Any]) -> Origin | None:
    if stored is None:
        return None
    source, checksum = stored
    if type(checksum) is not str or source not in sources:
        raise ValueError("an item is of no source of the index")
    return Origin(source, checksum)


def _check_numbers(vectors: Tensor, codes: Tensor, dim: int, classes: int) -> None:
    """Refuse anything but unit vectors with a class or −1 for each."""
    if vectors.dtype != torch.float32 or vectors.ndim != 2 or vectors.shape[1] != dim:
        got = f"{vectors.dtype} {tuple(vectors.shape)}"
        raise ValueError(f"vectors are {got}; expected float32 (N, {dim})")
    if not are_unit(vectors):
        raise ValueError("vectors are not of unit length")
    if codes.dtype != torch.int64 or codes.shape != vectors.shape[:1]:
        got = f"{codes.dtype} {tuple(codes.shape)}"
        raise ValueError(f"labels are {got} for {len(vectors)} vectors; expected int64 (N,)")
    if len(codes) and not (codes.min() >= -1 and codes.max() < classes):
        raise ValueError(f"labels reach beyond the {classes} classes")


def _features(features: Tensor, rows: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the features of each item that has some; ValueError for anything but unit ones."""
    is_sample = rows.dtype == torch.int64 and features.shape[:-1] == rows.shape == (len(rows),)
    if not is_sample or features.dtype != torch.float16 or not are_unit(features.float()):
        raise ValueError("features are not float16 (S, F) of unit length")
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(names)):
        raise ValueError(f"features reach beyond the {len(names)} items")
    return {names[row]: of for row, of in zip(rows.tolist(), features, strict=True)}


def _unique_strings(values: Any, what: str) -> list[str]:
    if not isinstance(values, list) or not all(type(value) is str for value in values):
        raise ValueError(f"{what} is not a list of strings")
    if len(set(values)) < len(values):
        raise ValueError(f"{what} holds a string twice")
    return values
