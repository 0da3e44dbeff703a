"""`Index`: unit vectors with names, labels and columns, searched exactly.

On disk it is a folder; see `stored.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Column, Type, as_column, cells_of
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.model.taught import mapped
from nofuss.ranking.neighbours import nearest
from nofuss.search.columns import ColumnTable
from nofuss.search.filter import LABEL, Condition, parse_filter
from nofuss.search.stored import MANIFEST, Label, Stored, read_stored, write_stored
from nofuss.search.stores.store import Item

__all__ = ["MANIFEST", "Index", "Label"]


class Index:
    """Vectors that are searched by Euclidean distance on the unit sphere: 0 equal, 2 opposite.

    Vectors are scaled to unit length when they are added, and so are queries. Names are unique.
    A row is a position in `names`; rows move up when others are removed.
    """

    def __init__(
        self,
        vectors: Tensor,
        names: Sequence[str],
        labels: Sequence[Label],
        *,
        extra: Mapping[str, Any] | None = None,
        table: ColumnTable | None = None,
    ) -> None:
        self.vectors = vectors
        self.names, self.labels = list(names), list(labels)
        self.table = ColumnTable(len(self.names)) if table is None else table
        self.extra = dict(extra or {})
        self._rows = {name: row for row, name in enumerate(self.names)}
        self._room = vectors[:0]  # more than `vectors` where items were added

    @classmethod
    def build(
        cls,
        vectors: Array,
        *,
        names: Sequence[str],
        labels: Sequence[Label] | None = None,
        columns: Mapping[str, Column | Sequence[Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> "Index":
        """Build an index of vectors (N, D); `extra` is anything JSON can hold, stored with it.

        `columns` are what filters see: {"price": [9.5, None, …], "shop": ["north", …]}.
        """
        index = cls(_unit(vectors[:0]), (), (), extra=extra)
        index.add(vectors, names=names, labels=labels, columns=columns)
        return index

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __repr__(self) -> str:
        return f"Index({len(self):,} vectors of {self.dim} dimensions)"

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""
        return self.vectors.shape[1]

    def row(self, name: str) -> int:
        """Return the row of an item."""
        if name not in self._rows:
            raise ValueError(f"the index holds no {name!r}")
        return self._rows[name]

    def add(
        self,
        vectors: Array,
        *,
        names: Sequence[str],
        labels: Sequence[Label] | None = None,
        columns: Mapping[str, Column | Sequence[Any]] | None = None,
    ) -> None:
        """Append items, of known or new classes; names and labels are kept as text."""
        x = _unit(vectors)
        names = [str(name) for name in names]
        given = [None] * len(names) if labels is None else labels
        labels = [None if label is None else str(label) for label in given]
        if not len(x) == len(names) == len(labels):
            got = f"{len(x)} vectors, {len(names)} names and {len(labels)} labels"
            raise ValueError(f"got {got}; expected as many of each")
        if x.shape[1] != self.dim:
            raise ValueError(f"got vectors of {x.shape[1]} dimensions; the index has {self.dim}")
        rows = {name: row for row, name in enumerate(names, start=len(self))}
        if len(rows) < len(names) or rows.keys() & self._rows.keys():
            twice = next(n for i, n in enumerate(names) if n in self or rows[n] != len(self) + i)
            raise ValueError(f"the index would hold {twice!r} twice; remove() the other one first")
        self.table.extend(len(x), {n: as_column(c) for n, c in (columns or {}).items()})
        self._append(x)
        self.names.extend(names)
        self.labels.extend(labels)
        self._rows |= rows

    def _append(self, x: Tensor) -> None:
        """Append vectors; room for a quarter more makes many small additions as cheap as one."""
        count, needed = len(self.vectors), len(self.vectors) + len(x)
        if not count:
            self.vectors = self._room = x
            return
        if needed > len(self._room) or self._room.data_ptr() != self.vectors.data_ptr():
            self._room = x.new_empty(needed + needed // 4, x.shape[1])
            self._room[:count] = self.vectors
        self._room[count:needed] = x
        self.vectors = self._room[:needed]

    def remove(self, names: Iterable[str]) -> None:
        """Remove items; those after them move up."""
        gone = {self.row(name) for name in names}
        if not gone:
            return
        kept = [row for row in range(len(self)) if row not in gone]
        self.vectors = self.vectors[kept]
        self.names = [self.names[row] for row in kept]
        self.labels = [self.labels[row] for row in kept]
        self.table = self.table.kept(kept)
        self._rows = {name: row for row, name in enumerate(self.names)}

    def mapped(self, matrix: Tensor) -> "Index":
        """Return an index of the same items after a map (D, D) of their vectors."""
        vectors = mapped(self.vectors, matrix)
        return Index.build(
            vectors,
            names=self.names,
            labels=self.labels,
            columns=self.table.columns,
            extra=self.extra,
        )

    def search(
        self, queries: Array, k: int = 10, *, where: Condition | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distances and rows (Q, k) of the nearest, ties by row; at most all items.

        `where` is a filter over the columns and `label`: "price<20 and shop=='north'".
        """
        if k < 1:
            raise ValueError(f"k is {k}; expected 1 or more")
        q = _unit(queries)
        if q.shape[1] != self.dim:
            raise ValueError(f"got queries of {q.shape[1]} dimensions; the index has {self.dim}")
        if isinstance(where, str):
            where = parse_filter(where, self.types)
        if where is not None:
            rows = torch.from_numpy(np.flatnonzero(self.table.matching(where, self.labels)))
            distances, places = nearest(q, self.vectors[rows], k)
            return distances, rows[places]
        return nearest(q, self.vectors, k)

    @property
    def types(self) -> dict[str, Type]:
        """The columns that a filter may name."""
        return {LABEL: "text", **self.table.types}

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return sorted({label for label in self.labels if label is not None})

    def items(self, rows: Sequence[int]) -> list[Item]:
        """Return what is known of some items."""
        columns = self.table.columns
        return [Item(self.names[row], self.labels[row], cells_of(columns, row)) for row in rows]

    def vectors_of(self, rows: Sequence[int]) -> Tensor:
        """Return the vectors (n, D) of some items."""
        return self.vectors[list(rows)]

    def sample(self, count: int, *, seed: int = 0) -> list[int]:
        """Return rows of at most `count` items, sorted."""
        chosen = np.random.default_rng(seed).permutation(len(self))[:count]
        return sorted(chosen.tolist())

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder, replacing the one in it as a whole."""
        content = Stored(self.vectors, self.names, self.labels, self.table, self.extra)
        write_stored(Path(folder), content)

    @classmethod
    def load(cls, folder: str | Path) -> "Index":
        """Load a folder that `save` wrote; every byte is checked first."""
        vectors, names, labels, table, extra = read_stored(Path(folder))
        return cls(vectors, names, labels, extra=extra, table=table)


def _unit(vectors: Array) -> Tensor:
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
