"""An index in PostgreSQL with pgvector: one table of items, one that says what it was made for.

    TABLE         id (see `number_of`), name, label, source, digest, columns jsonb,
                  embedding vector(D), features text (see `as_text`)
    TABLE_about   key, value jsonb: "index", and "source PATH" with the types of its columns

Every `put` is one transaction. Values reach SQL as parameters only, names as quoted identifiers.
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
    FIELDS,
    PAGE,
    PAGE_WITH_VECTORS,
    Engine,
    Row,
    as_text,
    number_of,
    pages,
    to_utf8,
)
from nofuss.search.engines.url import Url
from nofuss.search.filter import LABEL, Condition, as_sql, sql_value
from nofuss.search.index import About, Hits, Item

M, EF_CONSTRUCTION = 16, 100
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
MOST_DIMENSIONS = 2000  # of an HNSW index of pgvector; more are searched one by one
_SLOW = 0.9  # of the deadline: what fails later was too slow
_READ = {"columns": "columns::text", "embedding": "embedding::real[]"}


class Postgres(Engine):
    """The index in one table. Threads may share it: transactions wait for each other."""

    def __init__(self, url: Url) -> None:
        self._psycopg = _import_psycopg()
        self._sql = self._psycopg.sql
        super().__init__(url)
        self._lock, self._connection = threading.RLock(), None
        parts = {"t": "", "about": "_about", "hnsw": "_hnsw", "by_source": "_source"}
        self._names = {part: self._sql.Identifier(url.name + end) for part, end in parts.items()}
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

    def _query(self, text: str, **parts: Any) -> Any:
        """Return SQL in which {t} is the table of items and {about} the other one."""
        return self._sql.SQL(text).format(**self._names, **parts)

    def _run(self, text: str, values: Sequence[Any] = (), *, patient: bool = False) -> list[Any]:
        """Run one query in a transaction of its own; return its rows."""
        with self._cursor(patient=patient) as cursor:
            cursor.execute(self._query(text), values or None)
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    # What holds for the whole index

    def read_about(self) -> list[tuple[Any, Any]] | None:
        """Return all keys and values of the second table; None if there is neither."""
        names = [f'"{self._url.name}"', f'"{self._url.name}_about"']
        [found] = self._run("SELECT to_regclass(%s)::oid, to_regclass(%s)::oid", names)
        if found == (None, None):
            return None
        columns = "SELECT count(*) FROM pg_attribute WHERE attrelid = %s AND attname = ANY(%s)"
        needed = [(found[0], [*ALL_FIELDS]), (found[1], ["key", "value"])]
        if any(self._run(columns, each) != [(len(each[1]),)] for each in needed):
            raise EngineError(
                f"{self.place}: the table exists, but nofuss (or this version of it) did not make "
                "it; choose another ?table="
            )
        return self._run("SELECT key::text, value::text FROM {about}")

    def create(self, about: About) -> None:
        """Make an empty index, unless another process just has."""
        try:
            self._run("CREATE EXTENSION IF NOT EXISTS vector", patient=True)
        except EngineError as error:
            raise EngineError(
                f"{error}; install pgvector, and let an administrator run: CREATE EXTENSION vector"
            ) from None
        with self._cursor(patient=True) as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number_of(self._url.name)])
            cursor.execute(
                self._query(
                    "CREATE TABLE IF NOT EXISTS {t} (id bigint PRIMARY KEY, name text NOT NULL, "
                    "label text, source text NOT NULL, digest text NOT NULL, "
                    "columns jsonb NOT NULL, embedding vector({dim}) NOT NULL, "
                    "features text NOT NULL)",
                    dim=self._sql.Literal(about.dim),
                )
            )
            for create in (
                "INDEX IF NOT EXISTS {by_source} ON {t} (source)",
                "TABLE IF NOT EXISTS {about} (key text PRIMARY KEY, value jsonb NOT NULL)",
            ):
                cursor.execute(self._query(f"CREATE {create}"))
            insert = "INSERT INTO {about} VALUES ('index', %s) ON CONFLICT DO NOTHING"
            cursor.execute(self._query(insert), [json.dumps(about.as_dict())])

    def write_about(self, said: Mapping[str, object], *, gone: str = "") -> None:
        """Write values into the second table, and delete one key."""
        with self._cursor(patient=True) as cursor:
            for key, value in said.items():
                insert = "INSERT INTO {about} VALUES (%s, %s) ON CONFLICT (key) DO UPDATE "
                insert += "SET value = EXCLUDED.value"
                cursor.execute(self._query(insert), [key, json.dumps(value)])
            cursor.execute(self._query("DELETE FROM {about} WHERE key = %s"), [gone])

    def complete(self) -> None:
        """Build the graph, and what the planner must know of columns."""
        if not self.count():
            return
        if self.about.dim <= MOST_DIMENSIONS:
            with self._cursor(patient=True) as cursor:
                # The graph is built several times faster in memory than on disk.
                cursor.execute("SET LOCAL maintenance_work_mem = '1GB'")
                cursor.execute("SET LOCAL max_parallel_maintenance_workers = 0")
                self._create(
                    cursor,
                    "INDEX IF NOT EXISTS {hnsw} ON {t} USING hnsw (embedding vector_l2_ops) "
                    f"WITH (m = {M}, ef_construction = {EF_CONSTRUCTION})",
                )
        types = self.about.types
        with self._cursor(patient=True) as cursor:
            for column, kind in types.items():
                if column == LABEL:
                    continue  # a plain column
                # Both give the planner statistics; an index can't hold long texts.
                create = "INDEX IF NOT EXISTS {name} ON {t} (({value}))"
                if kind == "text":
                    create = "STATISTICS IF NOT EXISTS {name} ON ({value}) FROM {t}"
                name = f"{self._url.name}_{number_of(f'{column} {kind}'):x}"
                value = self._sql.SQL(sql_value(column, kind).replace("%s", "{0}"))
                literal = value.format(self._sql.Literal(column))
                self._create(cursor, create, name=self._sql.Identifier(name), value=literal)
        self._run("ANALYZE {t}", patient=True)

    def _create(self, cursor: Any, text: str, **parts: Any) -> None:
        """Create an index, or whatever it is; of several processes one waits for the other."""
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number_of(self._url.name)])
        cursor.execute(self._query(f"CREATE {text}", **parts))

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
                    self._query(
                        "UPDATE {t} SET label = %(label)s, source = %(source)s, "
                        "digest = %(digest)s, columns = %(columns)s WHERE id = %(id)s"
                    ),
                    revised,
                )
            if len(revised) == len(items):
                return
            cursor.execute(self._query("CREATE TEMP TABLE new (LIKE {t}) ON COMMIT DROP"))
            with cursor.copy("COPY new FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "text", "text", "text", "text", "jsonb", "bytea", "text"])
                for row, item in pairs:
                    if item.vector is not None:
                        vector = item.vector.numpy().astype(">f4")
                        head = struct.pack(">HH", len(vector), 0)  # as pgvector reads vectors
                        content = head + vector.tobytes()
                        copy.write_row((*row.values(), content, as_text(item.features)))
            # In the order of the ids: two processes that write the same ones do not lock up.
            cursor.execute(
                self._query(
                    "INSERT INTO {t} SELECT * FROM new ORDER BY id ON CONFLICT (id) DO UPDATE SET "
                    + ", ".join(f"{field} = EXCLUDED.{field}" for field in ALL_FIELDS[1:])
                )
            )

    def delete(self, names: Sequence[str]) -> None:
        """Remove items; names that are not there are ignored."""
        for some in pages(names):
            numbers = [number_of(name) for name in some]
            self._run("DELETE FROM {t} WHERE id = ANY(%s)", [numbers], patient=True)

    # Reading

    def count(self) -> int:
        """Return how many items there are."""
        return int(self._run("SELECT count(*) FROM {t}")[0][0])

    def search(self, vectors: Tensor, k: int = 10, *, where: Condition | None = None) -> list[Hits]:
        """Return the k nearest of each vector (Q, D) among the items that pass a filter."""
        condition, values = ("true", []) if where is None else as_sql(where, self.about.types)
        query = self._query(
            "SELECT id, name, distance ^ 2 FROM (SELECT id, name, embedding <-> %s::vector AS "
            "distance FROM {t} WHERE {condition} ORDER BY distance LIMIT {k}) AS nearest",
            condition=self._sql.SQL(condition),
            k=self._sql.Literal(k),
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

    def rows(self, numbers: Sequence[int], fields: Sequence[str]) -> list[Row]:
        """Return the fields of the items with these numbers."""
        return self._rows(fields, "id = ANY(%s)", [list(numbers)])

    def between(self, first: int, last: int, count: int) -> list[Row]:
        """Return id and name of the first items whose numbers lie between two."""
        condition = "id BETWEEN %s AND %s ORDER BY id LIMIT %s"
        return self._rows(("id", "name"), condition, [first, last, count])

    def items(self, source: str | None = None, *, vectors: bool = False) -> Iterator[Item]:
        """Yield all items, or those of one source, in the order of their numbers."""
        last, size = -1, PAGE_WITH_VECTORS if vectors else PAGE
        fields = ALL_FIELDS if vectors else FIELDS
        condition, values = ("true", []) if source is None else ("source = %s", [to_utf8(source)])
        condition += f" AND id > %s ORDER BY id LIMIT {size}"
        while rows := self._rows(fields, condition, [*values, last]):
            yield from self.read_items(rows)
            last = rows[-1]["id"]

    def _rows(self, fields: Sequence[str], condition: str, values: Sequence[Any]) -> list[Row]:
        selected = ", ".join(_READ.get(field, field) for field in fields)
        with self._cursor(binary="embedding" in fields) as cursor:
            cursor.execute(self._query(f"SELECT {selected} FROM {{t}} WHERE {condition}"), values)
            return [dict(zip(fields, row, strict=True)) for row in cursor.fetchall()]


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
