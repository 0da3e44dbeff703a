"""An index in Milvus, of a file (Milvus Lite) up to a cluster: the client is the same.

    NAME         id (see `number_of`), name, label ("" for none), source, digest, columns (JSON),
                 embedding
    NAME_about   key, value (JSON): "index", and "source PATH" with the types of its columns

A `put` replaces items by their id, so that one that was killed is repeated without harm.
"""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from nofuss.errors import EngineError, UsageError
from nofuss.search.engines import (
    ABOUT_SECONDS,
    checked_about,
    checked_distance,
    checked_item,
    checked_name,
    number_of,
    to_utf8,
)
from nofuss.search.engines.url import Url
from nofuss.search.filter import Condition, as_milvus, quoted
from nofuss.search.index import About, Hits, Item

M, EF_CONSTRUCTION = 16, 200
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
EF_SEARCH = 100
"""Candidates of a search at least; recall against all distances is then near one."""
_PAGE = 10_000  # items in one query; Milvus allows 16,384
_WITH_VECTORS = 2_000
_FIELDS = ["id", "name", "label", "source", "digest", "columns"]
_TEXT = {"max_length": 65_535}  # bytes, the most that Milvus allows


class Milvus:
    """The index in one collection."""

    matrix = None

    def __init__(self, url: Url) -> None:
        pymilvus = _import_pymilvus()
        self._url, self.place = url, url.shown
        self._is_file = url.location.endswith(".db")
        self._name, self._notes = url.name, f"{url.name}_about"
        self._kinds = pymilvus.DataType
        self._errors = (pymilvus.exceptions.MilvusException, OSError, ValueError, RuntimeError)
        self._about, self._about_until = About("", 0), 0.0
        with self._speaking():
            self._client = self._connect(pymilvus)
            for name in (self._name, self._notes):
                if self._client.has_collection(name):
                    self._client.load_collection(name)

    def _connect(self, pymilvus: Any) -> Any:
        """Return a client of a server, or of a file that this process then serves to itself."""
        if self._is_file and find_spec("milvus_lite") is None:
            raise UsageError("a file of Milvus needs milvus-lite: pip install 'nofuss[milvus]'")
        try:
            return pymilvus.MilvusClient(uri=self._url.location, token=self._url.token, timeout=10)
        except pymilvus.exceptions.MilvusException:
            if self._is_file:
                raise EngineError(
                    f"{self.place} can't be opened: another process has it open (stop that one "
                    "first), or it is not of Milvus Lite"
                ) from None
            raise

    def _speaking(self) -> Any:
        return self._url.speaking(*self._errors)

    def close(self) -> None:
        """Disconnect; let other processes open the file."""
        with self._speaking():
            self._client.close()
            if self._is_file:
                from milvus_lite.server_manager import server_manager_instance

                server_manager_instance.release_server(self._url.location)

    # What holds for the whole index

    @property
    def about(self) -> About:
        """What holds for all of it; read again now and then."""
        if time.monotonic() > self._about_until:
            found = self.read_about()
            if found is None:
                raise EngineError(f"{self.place}: the index is no longer there; index again")
            self._about, self._about_until = found, time.monotonic() + ABOUT_SECONDS
        return self._about

    def read_about(self) -> About | None:
        """Return what holds for the index; None if it does not exist, or was not completed."""
        needed = {self._name: {*_FIELDS, "embedding"}, self._notes: {"id", "key", "value"}}
        with self._speaking():
            exists = {name: self._client.has_collection(name) for name in needed}
            if not exists[self._name]:
                return None
            for name, fields in needed.items():
                found = self._client.describe_collection(name)["fields"] if exists[name] else []
                if not fields <= {field["name"] for field in found}:
                    raise EngineError(
                        f"{self.place}: the collection exists, but nofuss (or this version of it) "
                        "did not make it; choose another name"
                    )
            rows = self._query(self._notes, "id >= 0", ["key", "value"])
        notes = {row["key"]: _parsed(row["value"]) for row in rows}
        return checked_about(notes, self.place)

    def create(self, about: About) -> None:
        """Make an empty index: what it is for first, so that nothing unknown is left by a kill."""
        text, values = (self._kinds.VARCHAR, _TEXT), (self._kinds.JSON, dict[str, int]())
        notes = {"key": text, "value": values}
        fields = dict.fromkeys(("name", "label", "source", "digest"), text) | {"columns": values}
        with self._speaking():
            if not self._client.has_collection(self._notes):
                self._create(self._notes, notes, 2, exact=True)  # a vector there must be
            self._put_about({"index": about.as_dict()})
            if not self._client.has_collection(self._name):
                # Exact for Milvus Lite, whose graph and filters don't mix.
                self._create(self._name, fields, about.dim, exact=self._is_file)

    def _create(
        self, name: str, fields: Mapping[str, tuple[Any, Any]], dim: int, *, exact: bool
    ) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", self._kinds.INT64, is_primary=True)
        for field, (kind, options) in fields.items():
            schema.add_field(field, kind, **options)
        schema.add_field("embedding", self._kinds.FLOAT_VECTOR, dim=dim)
        index = self._client.prepare_index_params()
        index.add_index(
            "embedding",
            index_type="FLAT" if exact else "HNSW",
            metric_type="L2",
            params={} if exact else {"M": M, "efConstruction": EF_CONSTRUCTION},
        )
        self._client.create_collection(name, schema=schema, index_params=index)

    def commit(self, about: About, *, source: str | None = None) -> None:
        """Write what holds for the index, and for one source; wait until the graph is built."""
        key, notes = f"source {to_utf8(source or '')}", dict[str, object](index=about.as_dict())
        if source is not None and source in about.sources:
            notes[key] = dict(about.sources[source])
        with self._speaking():
            self._put_about(notes)
            if source is not None and source not in about.sources:
                self._client.delete(self._notes, ids=[number_of(key)])
            self._client.flush(self._name)
            while True:
                state = self._client.describe_index(self._name, "embedding")
                if not state or not int(state.get("pending_index_rows", 0)):
                    break
                time.sleep(0.5)
        self._about_until = 0.0
        self.count()  # waits until everything written can be found

    def _put_about(self, notes: Mapping[str, object]) -> None:
        rows = [
            {"id": number_of(key), "key": key, "value": value, "embedding": [0.0, 0.0]}
            for key, value in notes.items()
        ]
        self._client.upsert(self._notes, rows)

    # Writing

    def put(self, items: Sequence[Item]) -> None:
        """Write items; without a vector, the former one stays."""
        revised = [item for item in items if item.vector is None]
        for start in range(0, len(revised), _WITH_VECTORS):
            some = revised[start : start + _WITH_VECTORS]
            known = self.get([item.name for item in some], vectors=True)
            vectors = {item.name: item.vector for item in known}
            there = (
                item for item in some if item.name in vectors
            )  # another writer may delete some
            self.put([item._replace(vector=vectors[item.name]) for item in there])
        rows = [
            {
                "id": number_of(item.name),
                "name": to_utf8(item.name),
                "label": item.label or "",
                "source": to_utf8(item.origin.source if item.origin else ""),
                "digest": item.origin.digest if item.origin else "",
                "columns": dict(item.columns),
                "embedding": item.vector.numpy(),
            }
            for item in items
            if item.vector is not None
        ]
        with self._speaking():
            if rows:
                self._client.upsert(self._name, rows)

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        numbers = [number_of(name) for name in names]
        with self._speaking():
            for start in range(0, len(numbers), _PAGE):
                self._client.delete(self._name, ids=numbers[start : start + _PAGE])

    # Reading

    def count(self) -> int:
        """Return how many items there are."""
        with self._speaking():
            [row] = self._query(self._name, "", ["count(*)"])
            return int(row["count(*)"])

    def search(self, vectors: Tensor, k: int = 10, *, where: Condition | None = None) -> list[Hits]:
        """Return the k nearest of each vector (Q, D) among the items that pass a filter."""
        effort = {} if self._is_file else {"ef": max(EF_SEARCH, 2 * k)}
        with self._speaking():
            answers = self._client.search(
                self._name,
                data=list(vectors.numpy()),
                limit=k,
                filter="" if where is None else as_milvus(where),
                search_params={"metric_type": "L2", "params": effort},
                output_fields=["name"],
                consistency_level="Bounded",
            )
        found = []
        for answer in answers:
            rows = sorted(
                (
                    checked_distance(hit["distance"], self.place),
                    checked_name(hit["id"], hit["entity"].get("name"), self.place),
                )
                for hit in answer
            )
            found.append(Hits([name for _, name in rows], [distance for distance, _ in rows]))
        return found

    def get(self, names: Sequence[str], *, vectors: bool = False) -> list[Item]:
        """Return items by their names; those that are not there are left out."""
        found, size = dict[str, Item](), _WITH_VECTORS if vectors else _PAGE
        fields = [*_FIELDS, "embedding"] if vectors else _FIELDS
        for start in range(0, len(names), size):
            numbers = [number_of(name) for name in names[start : start + size]]
            with self._speaking():
                rows = self._query(self._name, f"id in {numbers}", fields)
            found |= {item.name: item for item in map(self._item, rows)}
        return [found[name] for name in names if name in found]

    def find(self, key: str) -> str | None:
        """Return the name of the item with this key; None if there is none."""
        if not re.fullmatch("[0-7][0-9a-f]{15}", key):
            return None
        with self._speaking():
            rows = self._query(self._name, f"id in [{int(key, 16)}]", ["id", "name"])
        return checked_name(rows[0]["id"], rows[0]["name"], self.place) if rows else None

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source, in the order of their numbers."""
        with self._speaking():
            pages = self._client.query_iterator(
                self._name,
                filter="" if source is None else f"source == {quoted(to_utf8(source))}",
                output_fields=[*_FIELDS, "embedding"] if vectors else _FIELDS,
                batch_size=_WITH_VECTORS if vectors else _PAGE,
                consistency_level="Strong",
            )
            while page := pages.next():
                yield from map(self._item, page)
            pages.close()

    def sample(self, count: int, *, seed: int = 0) -> list[str]:
        """Return the names of at most `count` items; any range of digests is a sample."""
        start = int(np.random.default_rng(seed).integers(2**63))
        names = self._between(start, 2**63 - 1, count)
        return names + self._between(0, start - 1, count - len(names))

    def _between(self, first: int, last: int, count: int) -> list[str]:
        """Return the names of at most `count` items whose numbers lie between two."""
        names = list[str]()
        while len(names) < count:
            with self._speaking():
                rows = self._client.query(
                    self._name,
                    filter=f"id >= {first} and id <= {last}",
                    output_fields=["id", "name"],
                    limit=min(count - len(names), _PAGE),
                )
            if not rows:
                break
            rows = sorted(rows, key=lambda row: row["id"])
            names += [checked_name(row["id"], row["name"], self.place) for row in rows]
            first = rows[-1]["id"] + 1
        return names

    def _query(self, name: str, condition: str, fields: list[str]) -> Any:
        """Return the rows that match, also those written a moment ago."""
        return self._client.query(
            name, filter=condition, output_fields=fields, consistency_level="Strong"
        )

    def _item(self, row: Mapping[str, Any]) -> Item:
        about = self.about
        return checked_item({**row, "columns": _parsed(row["columns"])}, about, self.place)


def _parsed(value: Any) -> Any:
    """Return JSON that a client may have read already; None for what is none."""
    try:
        return json.loads(value) if isinstance(value, str | bytes) else value
    except ValueError:
        return None


def _import_pymilvus() -> Any:
    """Import pymilvus, or raise an error with the command that installs it."""
    try:
        import pymilvus
    except ImportError:
        raise UsageError(
            "an index in Milvus needs pymilvus: pip install 'nofuss[milvus]'"
        ) from None
    for name in ("pymilvus", "milvus_lite", "grpc._server"):  # they log what they also raise
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return pymilvus
