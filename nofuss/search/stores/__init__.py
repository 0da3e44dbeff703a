"""Where an index can be kept besides the run's own folder: a database that many machines share.

address (URLs, and what must never be shown of them) → milvus | postgres: one `Store` each
→ recall (what the database finds, against all distances)

Every engine has the same few methods, see store.py. The run's own index (search/index.py) has
those that searching needs, too; so search and page take either.
"""

from nofuss.search.stores.store import Item, Note, Record, Searched, Store
from nofuss.search.stores.url import read_url

__all__ = ["Item", "Note", "Record", "Searched", "Store", "open_store"]


def open_store(url: str, *, flag: str) -> Store:
    """Connect to what a URL names; `flag` is where the user has given it."""
    address = read_url(url, flag=flag)
    if address.engine == "postgresql":
        from nofuss.search.stores.postgres import Postgres

        return Postgres(address)
    from nofuss.search.stores.milvus import Milvus

    return Milvus(address)
