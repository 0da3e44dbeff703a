"""An index in PostgreSQL with pgvector: one table of items, one that says what it was made for.

    TABLE         id (see `number_of`), name, label, source, size, mtime_ns, digest, facts,
                  columns jsonb, embedding vector(D)
    TABLE_about   key, value jsonb: "index", and "source PATH" with the types of its columns

Every `put` is one transaction. Values reach SQL as parameters only, names as quoted identifiers.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nofuss.data.columns import Type
from nofuss.errors import StoreError
from nofuss.search.filter import LABEL, Condition, as_sql, sql_value
from nofuss.search.stores.postgres_connection import PostgresConnection
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

M, EF_CONSTRUCTION = 16, 100
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
EF_SEARCH = 100
"""Candidates of a search at least; recall against all distances is then near one."""
MOST_DIMENSIONS = 2000  # of an HNSW index of pgvector; more are searched one by one
_IDS = 10_000  # in one query


class Postgres(Store):
    """The index in one table. Safe to use from several threads: queries wait for each other."""

    def __init__(self, address: StoreUrl) -> None:
        self._address, self.shown = address, address.shown
        self._db = PostgresConnection(address)
        self._cursor, self._query, self._run = self._db.cursor, self._db.query, self._db.run

    @property
    def about(self) -> About | None:
        """What the index was made for; None if it does not exist yet."""
        [[table, about]] = self._run(
            "SELECT to_regclass(%s)::oid, to_regclass(%s)::oid",
            [f'"{self._address.name}"', f'"{self._address.name}_about"'],
        )
        if table is None and about is None:
            return None
        rows = [] if about is None else self._run("SELECT value FROM {about} WHERE key = 'index'")
        if table is None or not rows:
            raise StoreError(
                f"{self.shown}: the table exists, but nofuss did not make it; choose another "
                "?table="
            )
        found = rows[0][0]
        [[dim]] = self._run(
            "SELECT atttypmod FROM pg_attribute WHERE attrelid = %s AND attname = 'embedding'",
            [table],
        )
        return About(found["model"], dim, found["metric"], found["format"])

    def create(self, about: About) -> None:
        """Make an empty index."""
        try:
            self._run("CREATE EXTENSION IF NOT EXISTS vector")
        except StoreError as error:
            raise StoreError(
                f"{error}; install pgvector, and let an administrator run: CREATE EXTENSION vector"
            ) from None
        with self._cursor() as cursor:
            cursor.execute(
                self._query(
                    "CREATE TABLE {t} (id bigint PRIMARY KEY, name text NOT NULL, label text, "
                    "source text NOT NULL, size bigint NOT NULL, mtime_ns bigint NOT NULL, "
                    "digest text NOT NULL, facts text NOT NULL, columns jsonb NOT NULL, "
                    "embedding vector({dim}) NOT NULL)",
                    dim=self._db.psycopg.sql.Literal(about.dim),
                )
            )
            cursor.execute(self._query("CREATE INDEX {by_source} ON {t} (source)"))
            cursor.execute(self._query("CREATE TABLE {about} (key text PRIMARY KEY, value jsonb)"))
            cursor.execute(
                self._query("INSERT INTO {about} VALUES ('index', %s)"),
                [json.dumps(about._asdict())],
            )

    # Writing

    def notes(self, source: str, names: Sequence[str]) -> dict[str, Note]:
        """Return the notes of all items of a source, and of these names whatever their source."""
        select = "SELECT name, source, size, mtime_ns, digest, facts FROM {t} WHERE "
        rows = self._run(select + "source = %s", [to_utf8(source)])
        found = {from_utf8(name): Note(from_utf8(of), *rest) for name, of, *rest in rows}
        missing = [number_of(name) for name in names if name not in found]
        for start in range(0, len(missing), _IDS):
            rows = self._run(select + "id = ANY(%s)", [missing[start : start + _IDS]])
            found |= {from_utf8(name): Note(from_utf8(of), *rest) for name, of, *rest in rows}
        return found

    def declare(self, source: str, types: Mapping[str, Type]) -> None:
        """Note a source and its columns, before its items are written."""
        self._run(
            "INSERT INTO {about} VALUES (%s, %s) "
            "ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
            [f"source {to_utf8(source)}", json.dumps(dict(types))],
        )

    def forget(self, source: str) -> None:
        """Remove the note of a source that has no items any more."""
        self._run("DELETE FROM {about} WHERE key = %s", [f"source {to_utf8(source)}"])

    def sources(self) -> dict[str, Mapping[str, Type]]:
        """Return the sources, and the types of their columns."""
        rows = self._run("SELECT key, value FROM {about} WHERE key LIKE 'source %' ORDER BY key")
        return {from_utf8(key.removeprefix("source ")): value for key, value in rows}

    def put(self, records: Sequence[Record], vectors: Tensor) -> None:
        """Write items in one transaction, replacing those of the same name."""
        if not len(records):
            return
        head = struct.pack(">HH", vectors.shape[1], 0)  # as pgvector reads vectors
        contents = vectors.numpy().astype(">f4")
        jsonb = self._db.psycopg.types.json.Jsonb
        with self._cursor() as cursor:
            cursor.execute(self._query("CREATE TEMP TABLE new (LIKE {t}) ON COMMIT DROP"))
            with cursor.copy("COPY new FROM STDIN (FORMAT BINARY)") as copy:
                types = "int8 text text text int8 int8 text text jsonb bytea"
                copy.set_types(types.split())
                for record, vector in zip(records, contents, strict=True):
                    row = self._row(record)
                    copy.write_row((*row[:-1], jsonb(row[-1]), head + vector.tobytes()))
            cursor.execute(
                self._query(
                    "INSERT INTO {t} SELECT * FROM new ON CONFLICT (id) DO UPDATE SET "
                    "name = EXCLUDED.name, label = EXCLUDED.label, source = EXCLUDED.source, "
                    "size = EXCLUDED.size, mtime_ns = EXCLUDED.mtime_ns, "
                    "digest = EXCLUDED.digest, facts = EXCLUDED.facts, "
                    "columns = EXCLUDED.columns, embedding = EXCLUDED.embedding"
                )
            )

    def revise(self, records: Sequence[Record]) -> None:
        """Replace everything but the vectors of items."""
        if not len(records):
            return
        rows = [self._row(record) for record in records]
        jsonb = self._db.psycopg.types.json.Jsonb
        with self._cursor() as cursor:
            cursor.executemany(
                self._query(
                    "UPDATE {t} SET label = %s, source = %s, size = %s, mtime_ns = %s, "
                    "digest = %s, facts = %s, columns = %s WHERE id = %s"
                ),
                [(*row[2:-1], jsonb(row[-1]), row[0]) for row in rows],
            )

    def discard(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        numbers = [number_of(name) for name in names]
        for start in range(0, len(numbers), _IDS):
            self._run("DELETE FROM {t} WHERE id = ANY(%s)", [numbers[start : start + _IDS]])

    def _row(self, record: Record) -> tuple[Any, ...]:
        """Return the fields but the vector, in the order of the table."""
        (name, label, cells), note = record
        number, source = number_of(name), to_utf8(note.source)
        return (number, to_utf8(name), label, source, *note[1:], dict(cells))

    def finish(self) -> None:
        """Build the graph and the indexes of columns, if they are not there yet."""
        if self.dim <= MOST_DIMENSIONS:
            with self._cursor() as cursor:
                # The graph is built several times faster in memory than on disk.
                cursor.execute("SET LOCAL maintenance_work_mem = '1GB'")
                cursor.execute("SET LOCAL max_parallel_maintenance_workers = 0")
                cursor.execute(
                    self._query(
                        "CREATE INDEX IF NOT EXISTS {hnsw} ON {t} USING hnsw "
                        "(embedding vector_l2_ops) WITH (m = {m}, ef_construction = {ef})",
                        m=self._db.psycopg.sql.Literal(M),
                        ef=self._db.psycopg.sql.Literal(EF_CONSTRUCTION),
                    )
                )
        sql = self._db.psycopg.sql
        with self._cursor() as cursor:
            for column, kind in self.types.items():
                if column == LABEL:
                    continue  # a plain column
                # Both give the planner statistics; an index can't hold long texts.
                create = "INDEX IF NOT EXISTS {name} ON {t} (({value}))"
                if kind == "text":
                    create = "STATISTICS IF NOT EXISTS {name} ON ({value}) FROM {t}"
                name = f"{self._address.name}_{number_of(f'{column} {kind}'):x}"
                value = sql.SQL(sql_value(column, kind).replace("%s", "{0}"))
                value = value.format(sql.Literal(column))
                cursor.execute(
                    self._query(f"CREATE {create}", name=sql.Identifier(name), value=value)
                )
        with self._cursor() as cursor:
            cursor.execute(self._query("ANALYZE {t}"))

    # Searching

    def __len__(self) -> int:
        return int(self._run("SELECT count(*) FROM {t}")[0][0])

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        rows = self._run("SELECT DISTINCT label FROM {t} WHERE label IS NOT NULL")
        return sorted(row[0] for row in rows)

    def search(
        self, queries: Tensor, k: int = 10, *, where: Condition | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distances and numbers (Q, k), nearest first; inf and −1 fill up."""
        sql = self._db.psycopg.sql
        condition, values = ("true", []) if where is None else as_sql(where, self.types)
        query = self._query(
            "SELECT id, embedding <-> %s::vector AS distance FROM {t} WHERE {condition} "
            "ORDER BY distance LIMIT {k}",
            condition=sql.SQL(condition),
            k=sql.Literal(k),
        )
        distances = torch.full((len(queries), k), torch.inf)
        numbers = torch.full((len(queries), k), -1, dtype=torch.int64)
        with self._cursor() as cursor:
            cursor.execute(f"SET LOCAL hnsw.ef_search = {min(1000, max(EF_SEARCH, 2 * k))}")
            # Without these a filter would only see the first candidates, or the first 20,000.
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            cursor.execute("SET LOCAL hnsw.max_scan_tuples = 200000")
            for i, vector in enumerate(queries.tolist()):
                cursor.execute(query, [json.dumps(vector), *values])
                rows = sorted((distance, number) for number, distance in cursor.fetchall())
                distances[i, : len(rows)] = torch.tensor([row[0] for row in rows])
                numbers[i, : len(rows)] = torch.tensor([row[1] for row in rows], dtype=torch.int64)
        return distances, numbers

    def items(self, numbers: Sequence[int], /) -> list[Item]:
        """Return what is known of the items with these numbers; KeyError if one is not there."""
        rows = self._run(
            "SELECT id, name, label, columns FROM {t} WHERE id = ANY(%s)", [list(numbers)]
        )
        found = {row[0]: Item(from_utf8(row[1]), row[2], row[3]) for row in rows}
        return [found[number] for number in numbers]

    def vectors_of(self, numbers: Sequence[int], /) -> Tensor:
        """Return the vectors (n, D) of the items with these numbers; KeyError if one is gone."""
        rows = self._run(
            "SELECT id, embedding::real[] FROM {t} WHERE id = ANY(%s)", [list(numbers)]
        )
        found = dict(rows)
        return torch.tensor([found[number] for number in numbers]).view(-1, self.dim)

    def sample(self, count: int, *, seed: int = 0) -> list[int]:
        """Return numbers of at most `count` items, sorted; any range of digests is a sample."""
        start = int(np.random.default_rng(seed).integers(2**63))
        select = "SELECT id FROM {t} WHERE id {} %s ORDER BY id LIMIT %s"
        rows = self._run(select.replace("{}", ">="), [start, count])
        rows += self._run(select.replace("{}", "<"), [start, count - len(rows)])
        return sorted(row[0] for row in rows)

    def chunks(self, count: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield numbers and vectors of all items, at most `count` at a time."""
        last = -1
        select = "SELECT id, embedding::real[] FROM {t} WHERE id > %s ORDER BY id LIMIT %s"
        while True:
            with self._cursor(binary=True) as cursor:
                cursor.execute(self._query(select), [last, count])
                rows = cursor.fetchall()
            if not rows:
                return
            yield [row[0] for row in rows], torch.tensor(np.array([row[1] for row in rows], "f4"))
            last = rows[-1][0]

    def records(self) -> Iterator[Record]:
        """Yield all items."""
        fields = "name, label, columns, source, size, mtime_ns, digest, facts"
        for name, label, cells, source, *rest in self._run(
            f"SELECT {fields} FROM {{t}} ORDER BY id"
        ):
            item = Item(from_utf8(name), label, cells)
            yield Record(item, Note(from_utf8(source), *rest))

    def close(self) -> None:
        """Disconnect."""
        self._db.close()
