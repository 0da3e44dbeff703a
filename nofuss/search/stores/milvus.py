"""An index in Milvus, of a file (Milvus Lite) up to a cluster: the client is the same.

    NAME         id (see `number_of`), name, label ("" for none), source, size, mtime_ns, digest,
                 facts, columns (JSON), embedding
    NAME_about   key, value (JSON): "index", and "source PATH" with the types of its columns

A `put` replaces items by their id, so that one that was killed is repeated without harm.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Type
from nofuss.errors import StoreError
from nofuss.search.filter import Condition, as_milvus, quoted
from nofuss.search.stores.milvus_collections import (
    ITEM,
    NOTE,
    connect,
    create_items,
    create_notes,
    import_pymilvus,
    item_of,
    note_of,
    parsed,
    release_file,
)
from nofuss.search.stores.store import (
    About,
    Item,
    Note,
    Record,
    Store,
    from_utf8,
    number_of,
    to_utf8,
)
from nofuss.search.stores.url import StoreUrl

EF_SEARCH = 100
"""Candidates of a search at least; recall against all distances is then near one."""
_PAGE = 10_000  # items in one query; Milvus allows 16,384


class Milvus(Store):
    """The index in one collection."""

    def __init__(self, address: StoreUrl) -> None:
        pymilvus = import_pymilvus()
        self._address, self.shown = address, address.shown
        self._is_file = address.location.endswith(".db")
        self._name, self._notes = address.name, f"{address.name}_about"
        self._errors = (pymilvus.exceptions.MilvusException, OSError, ValueError, RuntimeError)
        with self._speaking():
            self._client = connect(address, is_file=self._is_file)
            for name in (self._name, self._notes):
                if self._client.has_collection(name):
                    self._client.load_collection(name)

    def _speaking(self) -> Any:
        return self._address.speaking(*self._errors)

    @property
    def about(self) -> About | None:
        """What the index was made for; None if it does not exist yet."""
        with self._speaking():
            exists = [self._client.has_collection(name) for name in (self._name, self._notes)]
            if not any(exists):
                return None
            notes = self._about_rows() if exists[1] else {}
            if "index" not in notes and not exists[0]:
                return None  # killed before it was created
            if "index" not in notes:
                raise StoreError(
                    f"{self.shown}: the collection exists, but nofuss did not make it; choose "
                    "another name"
                )
            found = notes["index"]
            dim = found["dim"]
            if exists[0]:
                fields = self._client.describe_collection(self._name)["fields"]
                [dim] = [f["params"]["dim"] for f in fields if f["name"] == "embedding"]
            else:  # killed between the two: make the rest
                create_items(self._client, self._name, int(dim), exact=self._is_file)
            return About(found["model"], int(dim), found["metric"], found["format"])

    def create(self, about: About) -> None:
        """Make an empty index."""
        with self._speaking():
            if not self._client.has_collection(self._notes):
                create_notes(self._client, self._notes)
            self._put_about("index", about._asdict())
            create_items(self._client, self._name, about.dim, exact=self._is_file)

    # Notes of the whole index

    def _about_rows(self) -> dict[str, Any]:
        rows = self._query(self._notes, "id >= 0", ["key", "value"])
        return {from_utf8(row["key"]): parsed(row["value"]) for row in rows}

    def _query(self, name: str, condition: str, fields: list[str]) -> Any:
        """Return the rows that match, also those written a moment ago."""
        return self._client.query(
            name, filter=condition, output_fields=fields, consistency_level="Strong"
        )

    def _put_about(self, key: str, value: Mapping[str, Any]) -> None:
        row = {"id": number_of(key), "key": to_utf8(key), "value": dict(value)}
        self._client.upsert(self._notes, [row | {"embedding": [0.0, 0.0]}])

    def declare(self, source: str, types: Mapping[str, Type]) -> None:
        """Note a source and its columns, before its items are written."""
        with self._speaking():
            self._put_about(f"source {source}", types)

    def forget(self, source: str) -> None:
        """Remove the note of a source that has no items any more."""
        with self._speaking():
            self._client.delete(self._notes, ids=[number_of(f"source {source}")])

    def sources(self) -> dict[str, Mapping[str, Type]]:
        """Return the sources, and the types of their columns."""
        with self._speaking():
            rows = sorted(self._about_rows().items())
        return {
            key.removeprefix("source "): value for key, value in rows if key.startswith("source ")
        }

    # Writing

    def notes(self, source: str, names: Sequence[str]) -> dict[str, Note]:
        """Return the notes of all items of a source, and of these names whatever their source."""
        rows = list(self._all(f"source == {quoted(to_utf8(source))}", "name", *NOTE))
        found = {from_utf8(row["name"]): note_of(row) for row in rows}
        missing = [number_of(name) for name in names if name not in found]
        for start in range(0, len(missing), _PAGE):
            for row in self._by_number(missing[start : start + _PAGE], "name", *NOTE):
                found[from_utf8(row["name"])] = note_of(row)
        return found

    def put(self, records: Sequence[Record], vectors: Tensor) -> None:
        """Write items, replacing those of the same name."""
        rows = [
            {
                "id": number_of(name),
                "name": to_utf8(name),
                "label": label or "",
                **note._asdict(),
                "source": to_utf8(note.source),
                "columns": dict(cells),
                "embedding": vector,
            }
            for ((name, label, cells), note), vector in zip(records, vectors.numpy(), strict=True)
        ]
        with self._speaking():
            if rows:
                self._client.upsert(self._name, rows)

    def revise(self, records: Sequence[Record]) -> None:
        """Replace everything but the vectors of items."""
        for start in range(0, len(records), 1000):
            chosen = records[start : start + 1000]
            self.put(chosen, self.vectors_of([number_of(record.item.name) for record in chosen]))

    def discard(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        numbers = [number_of(name) for name in names]
        with self._speaking():
            for start in range(0, len(numbers), _PAGE):
                self._client.delete(self._name, ids=numbers[start : start + _PAGE])

    def finish(self) -> None:
        """Wait until the graph is built."""
        with self._speaking():
            self._client.flush(self._name)
            while True:
                state = self._client.describe_index(self._name, "embedding")
                if not state or not int(state.get("pending_index_rows", 0)):
                    break
                time.sleep(0.5)
        len(self)  # waits until everything written can be found

    # Searching

    def __len__(self) -> int:
        with self._speaking():
            [row] = self._query(self._name, "", ["count(*)"])
            return int(row["count(*)"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted; reads the label of every item."""
        return sorted({row["label"] for row in self._all("", "label")} - {""})

    def search(
        self, queries: Tensor, k: int = 10, *, where: Condition | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distances and numbers (Q, k), nearest first; inf and −1 fill up."""
        distances = torch.full((len(queries), k), torch.inf)
        numbers = torch.full((len(queries), k), -1, dtype=torch.int64)
        with self._speaking():
            answers = self._client.search(
                self._name,
                data=list(queries.numpy()),
                limit=k,
                filter="" if where is None else as_milvus(where),
                search_params={"metric_type": "L2", "params": self._effort(k)},
                consistency_level="Bounded",
            )
        for i, hits in enumerate(answers):
            rows = sorted((max(0.0, hit["distance"]) ** 0.5, hit["id"]) for hit in hits)
            distances[i, : len(rows)] = torch.tensor([row[0] for row in rows])
            numbers[i, : len(rows)] = torch.tensor([row[1] for row in rows], dtype=torch.int64)
        return distances, numbers

    def _effort(self, k: int) -> dict[str, int]:
        return {} if self._is_file else {"ef": max(EF_SEARCH, 2 * k)}

    def items(self, numbers: Sequence[int], /) -> list[Item]:
        """Return what is known of the items with these numbers; KeyError if one is not there."""
        found = {row["id"]: item_of(row) for row in self._by_number(numbers, *ITEM)}
        return [found[number] for number in numbers]

    def vectors_of(self, numbers: Sequence[int], /) -> Tensor:
        """Return the vectors (n, D) of the items with these numbers; KeyError if one is gone."""
        found = {row["id"]: row["embedding"] for row in self._by_number(numbers, "embedding")}
        vectors = np.array([found[number] for number in numbers], np.float32)
        return torch.from_numpy(vectors.reshape(len(numbers), -1))

    def sample(self, count: int, *, seed: int = 0) -> list[int]:
        """Return numbers of at most `count` items, sorted; any range of digests is a sample."""
        start = int(np.random.default_rng(seed).integers(2**63))
        numbers = self._from(start, 2**63 - 1, count)
        return sorted(numbers + self._from(0, start - 1, count - len(numbers)))

    def _from(self, first: int, last: int, count: int) -> list[int]:
        """Return at most `count` of the ids between two numbers."""
        if not count:
            return []
        with self._speaking():
            rows = self._client.query(
                self._name,
                filter=f"id >= {first} and id <= {last}",
                output_fields=["id"],
                limit=min(count, _PAGE),
            )
            return [row["id"] for row in rows]

    def _by_number(self, numbers: Sequence[int], *fields: str) -> list[Any]:
        if not numbers:
            return []
        with self._speaking():
            condition, wanted = f"id in {list(map(int, numbers))}", ["id", *fields]
            return list(self._query(self._name, condition, wanted))

    def _all(self, condition: str, *fields: str) -> Iterator[Any]:
        """Yield the fields of all items that match, read in the order of their ids."""
        with self._speaking():
            pages = self._client.query_iterator(
                self._name,
                filter=condition,
                output_fields=["id", *fields],
                batch_size=_PAGE if "embedding" not in fields else 2000,
                consistency_level="Strong",
            )
            while page := pages.next():
                yield from page
            pages.close()

    def chunks(self, count: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield numbers and vectors of all items, at most `count` at a time."""
        numbers, vectors = list[int](), list[Any]()
        for row in self._all("", "embedding"):
            numbers.append(row["id"])
            vectors.append(row["embedding"])
            if len(numbers) == count:
                yield numbers, torch.from_numpy(np.array(vectors, np.float32))
                numbers, vectors = [], []
        if numbers:
            yield numbers, torch.from_numpy(np.array(vectors, np.float32))

    def records(self) -> Iterator[Record]:
        """Yield all items."""
        for row in self._all("", *ITEM, *NOTE):
            yield Record(item_of(row), note_of(row))

    def close(self) -> None:
        """Disconnect."""
        with self._speaking():
            self._client.close()
            if self._is_file:
                release_file(self._address)
