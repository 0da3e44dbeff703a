"""An index in Milvus, of a file (Milvus Lite) up to a cluster: the client is the same.

    NAME         id (see `number_of`), name, label ("" for none), source, digest, columns (JSON),
                 embedding, features (see `as_text`)
    NAME_about   key, value (JSON): "index", and "source PATH" with the types of its columns

A `put` replaces items by their id, so that one that was killed is repeated without harm.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import filelock
from torch import Tensor

from nofuss.errors import EngineError, UsageError
from nofuss.search.engines import (
    ANSWER_SECONDS,
    EF_SEARCH,
    LAST,
    PAGE_WITH_VECTORS,
    Engine,
    Fields,
    Row,
    as_text,
    page_size,
    pages,
    to_utf8,
)
from nofuss.search.engines.url import Url
from nofuss.search.filter import Condition, as_milvus, quoted
from nofuss.search.index import About, Hits, Item, number_of

log = logging.getLogger("nofuss")

M, EF_CONSTRUCTION = 16, 200
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
_TEXT = {"max_length": 65_535}  # bytes, the most that Milvus allows
LOADS, LOAD_SECONDS = 20, 0.5
"""How often a collection without an index yet is asked for, and how long that waits."""


class Milvus(Engine):
    """The index in one collection.

    writes: of a file, which one process at a time has open, wait until other writers have closed
    it.
    """

    def __init__(self, url: Url, *, writes: bool = False) -> None:
        pymilvus = _import_pymilvus()
        super().__init__(url)
        self._is_file = url.location.endswith(".db")
        self._turn = filelock.FileLock(f"{url.location}.lock")
        self._items, self._notes = url.name, f"{url.name}_about"
        self._kinds = pymilvus.DataType
        errors = (pymilvus.exceptions.MilvusException, import_module("grpc").RpcError)
        self._errors = (*errors, OSError, ValueError, RuntimeError)
        with self._speaking():
            if self._is_file and writes:
                self._wait()
            self._client = self._connect(pymilvus)
            for name in (self._items, self._notes):
                if self._client.has_collection(name):
                    self._load(name)

    def _connect(self, pymilvus: Any) -> Any:
        """Return a client of a server, or of a file that this process then serves to itself."""
        if self._is_file and find_spec("milvus_lite") is None:
            raise UsageError("a file of Milvus needs milvus-lite: pip install 'nofuss[milvus]'")
        try:
            return pymilvus.MilvusClient(uri=self._url.location, token=self._url.token, timeout=10)
        except pymilvus.exceptions.MilvusException:
            if self._is_file:
                self._turn.release()
                raise EngineError(
                    f"{self.place} can't be opened: another process has it open (stop that one "
                    "first), or it is not of Milvus Lite"
                ) from None
            raise

    def _wait(self) -> None:
        try:
            self._turn.acquire(blocking=False)
        except filelock.Timeout:
            log.info(f"waiting for another command that writes {self.place}")
            self._turn.acquire()

    def _speaking(self) -> Any:
        return self._url.speaking(*self._errors)

    def close(self) -> None:
        """Disconnect; let other processes open the file."""
        with self._speaking():
            self._client.close()
            if self._is_file:
                from milvus_lite.server_manager import server_manager_instance

                server_manager_instance.release_server(self._url.location)
        self._turn.release()

    # What holds for the whole index

    def fields(self) -> list[set[str]]:
        """Return the names of the fields of both collections; of one that does not exist none."""
        found, client, timeout = list[set[str]](), self._client, ANSWER_SECONDS
        with self._speaking():
            for name in (self._items, self._notes):
                exists = client.has_collection(name, timeout=timeout)
                fields = (
                    client.describe_collection(name, timeout=timeout)["fields"] if exists else ()
                )
                found.append({field["name"] for field in fields})
        return found

    def read_about(self) -> list[tuple[Any, Any]]:
        """Return all keys and values of the second collection."""
        with self._speaking():
            rows = self._query(self._notes, "id >= 0", ["key", "value"])
        return [(row["key"], row["value"]) for row in rows]

    def create(self, about: About) -> None:
        """Make an empty index: what it is for first, so that nothing unknown is left by a kill."""
        text, values = (self._kinds.VARCHAR, _TEXT), (self._kinds.JSON, dict[str, int]())
        notes = {"key": text, "value": values}
        texts = ("name", "label", "source", "digest", "features")
        fields = dict.fromkeys(texts, text) | {"columns": values}
        with self._speaking():
            if not self._client.has_collection(self._notes):
                self._create(self._notes, notes, 2, exact=True)  # a vector there must be
            self.write_about({"index": about.as_dict()})
            if not self._client.has_collection(self._items):
                # Exact for Milvus Lite, whose graph and filters don't mix.
                self._create(self._items, fields, about.dim, exact=self._is_file)
            for name in (self._notes, self._items):
                self._load(name)

    def _load(self, name: str) -> None:
        """Have a collection searched; another command may be making it at this moment."""
        for left in reversed(range(LOADS)):
            try:
                self._client.load_collection(name)
                return
            except self._errors:
                if not left:
                    raise
                time.sleep(LOAD_SECONDS)

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

    def write_about(self, said: Mapping[str, object], *, gone: str = "") -> None:
        """Write values into the second collection, and delete one key."""
        rows = [
            {"id": number_of(key), "key": key, "value": value, "embedding": [0.0, 0.0]}
            for key, value in said.items()
        ]
        with self._speaking():
            self._client.upsert(self._notes, rows)
            if gone:
                self._client.delete(self._notes, ids=[number_of(gone)])

    def complete(self) -> None:
        """Wait until the graph is built, and everything written can be found."""
        with self._speaking():
            self._client.flush(self._items)
            while True:
                state = self._client.describe_index(self._items, "embedding")
                if not state or not int(state.get("pending_index_rows", 0)):
                    break
                time.sleep(0.5)
        self.count()

    # Writing

    def put(self, items: Sequence[Item]) -> None:
        """Write items; without a vector, the former one stays."""
        whole = [item for item in items if item.vector is not None]
        for some in pages([item for item in items if item.vector is None], PAGE_WITH_VECTORS):
            known = {i.name: i for i in self.get([item.name for item in some], vectors=True)}
            whole += [
                item._replace(vector=before.vector, features=before.features)
                for item in some
                if (before := known.get(item.name)) is not None  # another writer may delete some
            ]
        rows = [
            self.row_of(item)
            | {"embedding": item.vector.numpy(), "features": as_text(item.features)}
            for item in whole
            if item.vector is not None
        ]
        with self._speaking():
            if rows:
                self._client.upsert(self._items, rows)

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        with self._speaking():
            for some in pages(names):
                self._client.delete(self._items, ids=[number_of(name) for name in some])

    # Reading

    def count(self) -> int:
        """Return how many items there are."""
        with self._speaking():
            [row] = self._query(self._items, "", ["count(*)"])
            return int(row["count(*)"])

    def search(self, vectors: Tensor, k: int = 10, *, where: Condition | None = None) -> list[Hits]:
        """Return the k nearest of each vector (Q, D) among the items that pass a filter."""
        effort = {} if self._is_file else {"ef": max(EF_SEARCH, 2 * k)}
        with self._speaking():
            answers = self._client.search(
                self._items,
                data=list(vectors.numpy()),
                limit=k,
                filter="" if where is None else as_milvus(where),
                search_params={"metric_type": "L2", "params": effort},
                output_fields=["name"],
                consistency_level="Bounded",
                timeout=ANSWER_SECONDS,
            )
        return [
            self.read_hits((h["id"], h["entity"].get("name"), h["distance"]) for h in hits)
            for hits in answers
        ]

    def rows(self, fields: Fields, numbers: Sequence[int]) -> list[Row]:
        """Return the fields of the items with these numbers, at most a page of them."""
        with self._speaking():
            return self._query(self._items, f"id in {list(numbers)}", fields)

    def scan(self, fields: Fields, source: str | None, first: int, count: int) -> Iterator[Row]:
        """Yield the fields of `count` items from a number on, in the order of their numbers."""
        of_source = "" if source is None else f" and source == {quoted(to_utf8(source))}"
        with self._speaking():
            iterator = self._client.query_iterator(
                self._items,
                filter=f"id >= {first}{of_source}",
                output_fields=list(fields),
                batch_size=page_size(fields),
                limit=-1 if count == LAST else count,
                consistency_level="Strong",
                timeout=ANSWER_SECONDS,
            )
            while rows := iterator.next():
                yield from rows
            iterator.close()

    def _query(self, name: str, condition: str, fields: Fields, **options: Any) -> list[Row]:
        """Return the rows that match, also those written a moment ago."""
        found: list[Row] = self._client.query(
            name,
            filter=condition,
            output_fields=list(fields),
            consistency_level="Strong",
            timeout=ANSWER_SECONDS,
            **options,
        )
        return found


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
