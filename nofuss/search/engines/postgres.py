"""An index in PostgreSQL with pgvector: one table of items, one that says what it was made for.

    TABLE         id (see `number_of`), name, label, source, digest, columns jsonb,
                  embedding vector(D), features text (see `as_text`)
    TABLE_about   key, value jsonb: "index", and "source PATH" with the types of its columns

Every `put` is one transaction. Values reach SQL as parameters only; the name of the table is a
word (url.py), in quotes.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor

from nofuss.errors import EngineError, UsageError
from nofuss.search.engines import (
    ALL_FIELDS,
    ANSWER_SECONDS,
    EF_SEARCH,
    Engine,
    Fields,
    Row,
    as_text,
    page_size,
    pages,
    to_utf8,
)
from nofuss.search.engines.url import Url
from nofuss.search.filter import LABEL, Condition, as_sql, sql_value
from nofuss.search.index import About, Hits, Item, number_of

M, EF_CONSTRUCTION = 16, 100
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
MOST_DIMENSIONS = 2000  # of an HNSW index of pgvector; more are searched one by one
_SLOW = 0.9  # of the deadline: what fails later was too slow
_READ = {"columns": "columns::text", "embedding": "embedding::real[]"}


class Postgres(Engine):
    """The index in one table. Threads may share it: transactions wait for each other."""

    def __init__(self, url: Url) -> None:
        self._psycopg = _import_psycopg()
        super().__init__(url)
        self._lock, self._connection = threading.RLock(), None
        self._items, self._notes = f'"{url.name}"', f'"{url.name}_about"'
        with self._cursor():
            pass  # to fail early

    # One connection

    @contextmanager
    def _cursor(self, *, binary: bool = False, patient: bool = False) -> Iterator[Any]:
        """Open a transaction; connect again if the connection was lost.

        patient: without a deadline, for what may wait for another process, or take long itself.
        """
        until = time.monotonic() + ANSWER_SECONDS
        with self._url.speaking(self._psycopg.Error, OSError, UnicodeError):
            if not self._lock.acquire(timeout=-1 if patient else ANSWER_SECONDS):
                raise self._no_answer()
            try:
                left = ANSWER_SECONDS if patient else until - time.monotonic()
                connection = self._connected(left)
                with (
                    nullcontext() if patient else self._cut(connection, left),
                    connection.transaction(),
                    connection.cursor(binary=binary) as cursor,
                ):
                    # A server that is only slow stops by itself, a little earlier.
                    most = 0 if patient else int(1000 * _SLOW * ANSWER_SECONDS)
                    cursor.execute(f"SET LOCAL statement_timeout = {most}")
                    yield cursor
            finally:
                self._lock.release()

    def _connected(self, seconds: float) -> Any:
        if self._connection is None or self._connection.closed:
            if seconds < 2:  # the shortest that libpq waits
                raise self._no_answer()
            self._connection = self._psycopg.connect(
                self._url.location,
                connect_timeout=int(seconds),
                application_name="nofuss",
                prepare_threshold=None,  # a prepared plan does not know how rare a filter is
            )
        return self._connection

    @contextmanager
    def _cut(self, connection: Any, seconds: float) -> Iterator[None]:
        """Cut the connection after some seconds: psycopg waits for an answer without end."""
        late = time.monotonic() + _SLOW * seconds
        with socket.socket(fileno=os.dup(connection.fileno())) as line:

            def cut() -> None:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(seconds, cut)
            timer.start()
            try:
                yield
            except self._psycopg.Error:
                if time.monotonic() > late:
                    raise self._no_answer() from None
                raise
            finally:
                timer.cancel()
                timer.join()

    def _no_answer(self) -> EngineError:
        return EngineError(
            f"{self.place} does not answer within {ANSWER_SECONDS:.0f} s; see that it runs, and "
            "try again"
        )

    def _run(
        self, text: str, values: Sequence[Any] | None = None, **options: bool
    ) -> list[tuple[Any, ...]]:
        """Run one query in a transaction of its own; return its rows."""
        with self._cursor(**options) as cursor:
            cursor.execute(text, values)
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    # What holds for the whole index

    def fields(self) -> list[set[str]]:
        """Return the names of the columns of both tables; of one that does not exist none."""
        names = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s)"
        tables = (self._items, self._notes)
        return [{name for (name,) in self._run(names, [table])} for table in tables]

    def read_about(self) -> list[tuple[Any, Any]]:
        """Return all keys and values of the second table."""
        return self._run(f"SELECT key::text, value::text FROM {self._notes}")

    def create(self, about: About) -> None:
        """Make an empty index, unless another process just has."""
        try:
            self._run("CREATE EXTENSION IF NOT EXISTS vector", patient=True)
        except EngineError as error:
            raise EngineError(
                f"{error}; install pgvector, and let an administrator run: CREATE EXTENSION vector"
            ) from None
        with self._alone() as cursor:
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._items} (id bigint PRIMARY KEY, "
                "name text NOT NULL, label text, source text NOT NULL, digest text NOT NULL, "
                f"columns jsonb NOT NULL, embedding vector({about.dim}) NOT NULL, "
                "features text NOT NULL)"
            )
            by_source = f'"{self._url.name}_source"'
            cursor.execute(f"CREATE INDEX IF NOT EXISTS {by_source} ON {self._items} (source)")
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._notes} (key text PRIMARY KEY, "
                "value jsonb NOT NULL)"
            )
            insert = f"INSERT INTO {self._notes} VALUES ('index', %s) ON CONFLICT DO NOTHING"
            cursor.execute(insert, [json.dumps(about.as_dict())])

    def write_about(self, said: Mapping[str, object], *, gone: str = "") -> None:
        """Write values into the second table, and delete one key."""
        with self._cursor(patient=True) as cursor:
            for key, value in said.items():
                cursor.execute(
                    f"INSERT INTO {self._notes} VALUES (%s, %s) ON CONFLICT (key) DO UPDATE "
                    "SET value = EXCLUDED.value",
                    [key, json.dumps(value)],
                )
            cursor.execute(f"DELETE FROM {self._notes} WHERE key = %s", [gone])

    def complete(self) -> None:
        """Build the graph, and what the planner must know of columns."""
        if not self.count():
            return
        with self._alone() as cursor:
            if self.about.dim <= MOST_DIMENSIONS:
                # The graph is built several times faster in memory than on disk.
                cursor.execute("SET LOCAL maintenance_work_mem = '1GB'")
                cursor.execute("SET LOCAL max_parallel_maintenance_workers = 0")
                cursor.execute(
                    f'CREATE INDEX IF NOT EXISTS "{self._url.name}_hnsw" ON {self._items} '
                    "USING hnsw (embedding vector_l2_ops) "
                    f"WITH (m = {M}, ef_construction = {EF_CONSTRUCTION})"
                )
            for column, kind in self.about.types.items():
                if column == LABEL:
                    continue  # a plain column
                name = f'"{self._url.name}_{number_of(f"{column} {kind}"):x}"'
                literal = self._psycopg.sql.Literal(column).as_string(cursor)
                value = sql_value(column, kind).replace("%s", literal)
                # Both give the planner statistics; an index can't hold long texts.
                what = f"INDEX IF NOT EXISTS {name} ON {self._items} (({value}))"
                if kind == "text":
                    what = f"STATISTICS IF NOT EXISTS {name} ON ({value}) FROM {self._items}"
                cursor.execute(f"CREATE {what}")
        self._run(f"ANALYZE {self._items}", patient=True)

    @contextmanager
    def _alone(self) -> Iterator[Any]:
        """Open a transaction that creates something: of several processes one waits for another."""
        with self._cursor(patient=True) as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number_of(self._url.name)])
            yield cursor

    # Writing

    def put(self, items: Sequence[Item]) -> None:
        """Write items in one transaction; without a vector, the former one stays."""
        jsonb = self._psycopg.types.json.Jsonb
        rows = [self.row_of(item) for item in items]
        for row in rows:
            row |= {"label": row["label"] or None, "columns": jsonb(row["columns"])}
        pairs = list(zip(rows, items, strict=True))
        with self._cursor(patient=True) as cursor:
            if revised := [row for row, item in pairs if item.vector is None]:
                cursor.executemany(
                    f"UPDATE {self._items} SET label = %(label)s, source = %(source)s, "
                    "digest = %(digest)s, columns = %(columns)s WHERE id = %(id)s",
                    revised,
                )
            if len(revised) == len(items):
                return
            cursor.execute(f"CREATE TEMP TABLE new (LIKE {self._items}) ON COMMIT DROP")
            with cursor.copy("COPY new FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "text", "text", "text", "text", "jsonb", "bytea", "text"])
                for row, item in pairs:
                    if item.vector is not None:
                        vector = item.vector.numpy().astype(">f4")
                        head = struct.pack(">HH", len(vector), 0)  # as pgvector reads vectors
                        content = head + vector.tobytes()
                        copy.write_row((*row.values(), content, as_text(item.features)))
            # In the order of the ids: two processes that write the same ones do not lock up.
            changes = ", ".join(f"{field} = EXCLUDED.{field}" for field in ALL_FIELDS[1:])
            cursor.execute(
                f"INSERT INTO {self._items} SELECT * FROM new ORDER BY id "
                f"ON CONFLICT (id) DO UPDATE SET {changes}"
            )

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        for some in pages(names):
            numbers = [number_of(name) for name in some]
            self._run(f"DELETE FROM {self._items} WHERE id = ANY(%s)", [numbers], patient=True)

    # Reading

    def count(self) -> int:
        """Return how many items there are."""
        return int(self._run(f"SELECT count(*) FROM {self._items}")[0][0])

    def search(self, vectors: Tensor, k: int = 10, *, where: Condition | None = None) -> list[Hits]:
        """Return the k nearest of each vector (Q, D) among the items that pass a filter."""
        condition, values = ("true", []) if where is None else as_sql(where, self.about.types)
        query = (
            "SELECT id, name, distance ^ 2 FROM (SELECT id, name, embedding <-> %s::vector AS "
            f"distance FROM {self._items} WHERE {condition} ORDER BY distance LIMIT {k}) AS nearest"
        )
        found = []
        with self._cursor() as cursor:
            # Without iterative scans a filter would only see the first candidates, or 20,000.
            cursor.execute(
                f"SET LOCAL hnsw.ef_search = {min(1000, max(EF_SEARCH, 2 * k))}; "
                "SET LOCAL hnsw.iterative_scan = strict_order; "
                "SET LOCAL hnsw.max_scan_tuples = 200000"
            )
            for vector in vectors.tolist():
                cursor.execute(query, [json.dumps(vector), *values])
                found.append(self.read_hits(cursor.fetchall()))
        return found

    def rows(self, fields: Fields, numbers: Sequence[int]) -> list[Row]:
        """Return the fields of the items with these numbers, at most a page of them."""
        return self._rows(fields, "id = ANY(%s)", [list(numbers)])

    def scan(self, fields: Fields, source: str | None, first: int, count: int) -> Iterator[Row]:
        """Yield the fields of `count` items from a number on, in the order of their numbers."""
        condition, values = ("true", []) if source is None else ("source = %s", [to_utf8(source)])
        condition += " AND id >= %s ORDER BY id LIMIT %s"
        while rows := self._rows(
            fields, condition, [*values, first, min(count, page_size(fields))]
        ):
            yield from rows
            first, count = rows[-1]["id"] + 1, count - len(rows)

    def _rows(self, fields: Fields, condition: str, values: Sequence[Any]) -> list[Row]:
        selected = ", ".join(_READ.get(field, field) for field in fields)
        query = f"SELECT {selected} FROM {self._items} WHERE {condition}"
        found = self._run(query, values, binary="embedding" in fields)
        return [dict(zip(fields, row, strict=True)) for row in found]


def _import_psycopg() -> Any:
    """Import psycopg, or raise an error with the command that installs it."""
    try:
        import psycopg
        import psycopg.sql
        import psycopg.types.json
    except ImportError:
        raise UsageError(
            "an index in PostgreSQL needs psycopg: pip install 'nofuss[postgres]'"
        ) from None
    return psycopg
