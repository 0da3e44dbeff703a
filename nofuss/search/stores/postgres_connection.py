"""One connection to PostgreSQL: transactions, and queries over an index's tables."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nofuss.errors import UsageError
from nofuss.search.stores.url import StoreUrl


def import_psycopg() -> Any:
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


class PostgresConnection:
    """Safe to use from several threads: transactions wait for each other."""

    def __init__(self, address: StoreUrl) -> None:
        self.psycopg = import_psycopg()
        self._address, self._lock = address, threading.RLock()
        self._connection: Any = None
        name = self.psycopg.sql.Identifier
        self._names = {
            "t": name(address.name),
            "about": name(f"{address.name}_about"),
            "hnsw": name(f"{address.name}_hnsw"),
            "by_source": name(f"{address.name}_source"),
        }
        with self.cursor():
            pass  # to fail early

    @contextmanager
    def cursor(self, *, binary: bool = False) -> Iterator[Any]:
        """Open a transaction; connect again if the connection was lost."""
        with self._lock, self._address.speaking(self.psycopg.Error, OSError, UnicodeError):
            if self._connection is None or self._connection.closed:
                self._connection = self.psycopg.connect(
                    self._address.location,
                    connect_timeout=10,
                    application_name="nofuss",
                    prepare_threshold=None,  # a prepared plan does not know how rare a filter is
                )
            connection = self._connection
            with connection.transaction(), connection.cursor(binary=binary) as cursor:
                yield cursor

    def query(self, text: str, **parts: Any) -> Any:
        """Return SQL in which {t} is the table of items and {about} the other one."""
        return self.psycopg.sql.SQL(text).format(**self._names, **parts)

    def run(self, text: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run one query in a transaction of its own; return its rows."""
        with self.cursor() as cursor:
            cursor.execute(self.query(text), values or None)
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
