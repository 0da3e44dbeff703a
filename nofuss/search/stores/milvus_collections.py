"""The two collections of an index in Milvus: their fields, and rows as items and notes."""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nofuss.errors import StoreError, UsageError
from nofuss.search.stores.store import Item, Note, from_utf8
from nofuss.search.stores.url import StoreUrl

M, EF_CONSTRUCTION = 16, 200
"""Neighbours of a vector in the graph (HNSW), and candidates while it is built."""
ITEM = ("name", "label", "columns")
NOTE = ("source", "size", "mtime_ns", "digest", "facts")
_TEXT = {"max_length": 65_535}  # bytes, the most that Milvus allows


def import_pymilvus() -> Any:
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


def connect(address: StoreUrl, *, is_file: bool) -> Any:
    """Return a client of a server, or of a file that this process then serves to itself."""
    pymilvus = import_pymilvus()
    if is_file and find_spec("milvus_lite") is None:
        raise UsageError("a file of Milvus needs milvus-lite: pip install 'nofuss[milvus]'")
    try:
        return pymilvus.MilvusClient(uri=address.location, token=address.token, timeout=10)
    except pymilvus.exceptions.MilvusException:
        if is_file:
            raise StoreError(
                f"{address.shown} can't be opened: another process has it open (stop that one "
                "first), or it is not of Milvus Lite"
            ) from None
        raise


def release_file(address: StoreUrl) -> None:
    """Let other processes open the file."""
    from milvus_lite.server_manager import server_manager_instance

    server_manager_instance.release_server(address.location)


def create_notes(client: Any, name: str) -> None:
    """Create the collection of what the index was made for; a vector there must be."""
    kind = import_pymilvus().DataType
    _create(client, name, {"key": (kind.VARCHAR, _TEXT), "value": (kind.JSON, {})}, 2, exact=True)


def create_items(client: Any, name: str, dim: int, *, exact: bool) -> None:
    """Create the collection of items; exact for Milvus Lite, whose graph and filters don't mix."""
    kind = import_pymilvus().DataType
    fields = {
        "name": (kind.VARCHAR, _TEXT),
        "label": (kind.VARCHAR, _TEXT),
        "source": (kind.VARCHAR, _TEXT),
        "size": (kind.INT64, {}),
        "mtime_ns": (kind.INT64, {}),
        "digest": (kind.VARCHAR, {"max_length": 128}),
        "facts": (kind.VARCHAR, {"max_length": 64}),
        "columns": (kind.JSON, {}),
    }
    _create(client, name, fields, dim, exact=exact)


def _create(
    client: Any,
    name: str,
    fields: Mapping[str, tuple[Any, Mapping[str, int]]],
    dim: int,
    *,
    exact: bool,
) -> None:
    kind = import_pymilvus().DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", kind.INT64, is_primary=True)
    for field, (of, options) in fields.items():
        schema.add_field(field, of, **options)
    schema.add_field("embedding", kind.FLOAT_VECTOR, dim=dim)
    index = client.prepare_index_params()
    graph = {"M": M, "efConstruction": EF_CONSTRUCTION}
    index.add_index(
        "embedding",
        index_type="FLAT" if exact else "HNSW",
        metric_type="L2",
        params={} if exact else graph,
    )
    client.create_collection(name, schema=schema, index_params=index)


def item_of(row: Mapping[str, Any]) -> Item:
    """Return the item in a row of a query."""
    return Item(from_utf8(row["name"]), row["label"] or None, parsed(row["columns"]))


def note_of(row: Mapping[str, Any]) -> Note:
    """Return the note in a row of a query."""
    source, *rest = (row[field] for field in NOTE)
    return Note(from_utf8(source), *rest)


def parsed(value: Any) -> Any:
    """Return JSON that a client may have read already."""
    return json.loads(value) if isinstance(value, str | bytes) else value
