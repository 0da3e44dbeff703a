"""URLs of databases, and what is shown of them: never a password, wherever it came from.

    milvus:birds.db                             a file, by Milvus Lite in this process
    milvus://host:19530/birds                   a server or cluster; ?tls=true for TLS
    postgresql://user@host:5432/db?table=birds  PostgreSQL with pgvector; other options as in libpq

Passwords are in the URL (`user:password@`) or, better, in the environment: `MILVUS_TOKEN`
(`user:password` or a key), `PGPASSWORD` or libpq's password file.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from nofuss.errors import EngineError, NofussError, UsageError

Engine = Literal["milvus", "postgresql"]
FORMS = "milvus:FILE.db, milvus://HOST:19530/COLLECTION or postgresql://HOST/DATABASE[?table=TABLE]"
DEFAULT = "nofuss"
"""The table or collection where the URL names none."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
_SECRET_OPTIONS = ("password", "sslpassword", "token")


@dataclass(frozen=True)
class Url:
    """Where an index is kept."""

    engine: Engine
    shown: str
    """The URL without user, password and options: for messages."""
    name: str
    """The table or collection."""
    location: str = field(repr=False)
    """What the engine's client takes; may hold a password."""
    token: str = field(default="", repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def without_secrets(self, text: str) -> str:
        """Return the text with everything secret in it replaced by ***."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    @contextmanager
    def speaking(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn errors of the engine's client into one line without secrets."""
        try:
            yield
        except NofussError:
            raise
        except kinds as error:
            said = getattr(error, "message", None) or str(error) or type(error).__name__
            reason = " ".join(self.without_secrets(str(said)).split())[:300]
            raise EngineError(f"{self.shown}: {reason}") from None  # the cause may hold secrets


def read_url(url: str, *, flag: str) -> Url:
    """Return what a URL names; UsageError, which does not quote it, for anything else."""
    if any(0xD800 <= ord(character) <= 0xDFFF for character in url):
        raise UsageError(f"{flag}: write bytes that are not UTF-8 as %FF")
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in ("milvus", "postgresql", "postgres"):
        raise UsageError(f"{flag} takes a URL: {FORMS}")
    if scheme == "milvus" and not rest.startswith("//"):
        if not rest.endswith(".db") or rest == ".db":
            raise UsageError(f"{flag} {url} names no file that ends in .db; expected {FORMS}")
        return Url("milvus", url, DEFAULT, os.path.expanduser(rest))
    parts = _split(url, flag)
    options, host = dict(parse_qsl(parts.query, keep_blank_values=True)), _host(parts)
    database = unquote(parts.path.strip("/"))
    name = (database or DEFAULT) if scheme == "milvus" else options.pop("table", DEFAULT)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{flag}: {name!r:.60} can't be a name; use letters, digits and _")
    if scheme == "milvus":
        tls = options.pop("tls", "false").lower()
        if not parts.hostname or options or tls not in ("true", "false"):
            raise UsageError(f"{flag}: a milvus URL has a host and no options but ?tls=true")
        token = os.environ.get("MILVUS_TOKEN", "")
        if parts.username is not None:
            token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        location = f"http{'s' if tls == 'true' else ''}://{host}"
        secrets = _spellings([parts.password or "", token, token.partition(":")[2]])
        return Url("milvus", f"milvus://{host}/{name}", name, location, token, secrets)
    plain = parts._replace(scheme="postgresql", query=urlencode(options, quote_via=quote))
    secrets = _spellings(
        [
            parts.password or "",
            os.environ.get("PGPASSWORD", ""),
            *(options.get(option, "") for option in _SECRET_OPTIONS),
        ]
    )
    shown = f"postgresql://{host}/{database}?table={name}"
    return Url("postgresql", shown, name, urlunsplit(plain), "", secrets)


def _split(url: str, flag: str) -> SplitResult:
    # A password with one of these would be cut where nobody expects it, and shown as a host.
    ambiguous = f"{flag}: write @ / ? # : in a user or password as %40 %2F %3F %23 %3A"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UsageError(f"{ambiguous}, and the port as a number") from None
    rest = parts.path + parts.query + parts.fragment
    if "@" in rest or parts.fragment or parts.netloc.count("@") > 1:
        raise UsageError(ambiguous)
    return parts


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port is None else f"{host}:{parts.port}"


def _spellings(secrets: list[str]) -> tuple[str, ...]:
    """Return each secret as it was written and as it is meant."""
    return tuple({form for secret in secrets for form in (secret, unquote(secret)) if form})
