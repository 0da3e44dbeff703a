"""URLs of databases: what they name, and that nothing secret in them is ever shown."""

import pytest

from nofuss.cli import main
from nofuss.errors import EngineError, UsageError
from nofuss.search.engines import Engine, from_utf8, to_utf8
from nofuss.search.engines.milvus import Milvus
from nofuss.search.engines.postgres import Postgres
from nofuss.search.engines.url import read_url
from nofuss.search.index import number_of


@pytest.mark.parametrize(
    ("url", "engine", "shown", "name"),
    [
        ("milvus:a/birds.db", "milvus", "milvus:a/birds.db", "nofuss"),
        ("milvus://h:19530/birds", "milvus", "milvus://h:19530/birds", "birds"),
        ("milvus://u:s3cret@h:19530/birds?tls=true", "milvus", "milvus://h:19530/birds", "birds"),
        ("postgresql://h/db", "postgresql", "postgresql://h/db?table=nofuss", "nofuss"),
        (
            "postgres://u:s3cret@[::1]:5/db?table=t&sslmode=require&password=s3cret",
            "postgresql",
            "postgresql://[::1]:5/db?table=t",
            "t",
        ),
    ],
)
def test_what_a_url_names(url: str, engine: str, shown: str, name: str) -> None:
    address = read_url(url, flag="--to")
    assert (address.engine, address.shown, address.name) == (engine, shown, name)
    assert "s3cret" not in repr(address)
    assert ("s3cret" in address.without_secrets("a s3cret")) == ("s3cret" not in url)
    assert "table" not in address.location


@pytest.mark.parametrize(
    "url",
    [
        "s3cret",
        "mysql://u:s3cret@h/db",
        "postgresql://u:s3cret/more@h/db",
        "postgresql://u:12/s3cret@h/db",
        "postgresql://u:12?s3cret@h/db",
        "postgresql://u:12#s3cret@h/db",
        "postgresql://u:p@s3cret@h/db",
        "postgresql://u:s3cret@h:port/db",
        "postgresql://u:s3cret@[h/db",
        "postgresql://u:s3cret@h/db?table=a-b",
        "milvus://u:s3cret@h:1/a%20b",
        "milvus://u:s3cret@h:1/a?password=s3cret",
        "milvus://u:s3cret@/a",
        "postgresql://u:s3cret@\u2100/db",
    ],
)
def test_what_can_not_be_used_is_one_line_without_secrets(
    url: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        read_url(url, flag="--to")
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["postgresql://h/db", "milvus://h/x", "milvus://u:s3c%72et@h/x", "postgresql://u:s3cret@h"],
)
def test_what_clients_say_is_searched_for_secrets(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for those that came from the environment."""
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    monkeypatch.setenv("MILVUS_TOKEN", "root:s3cret")
    address = read_url(url, flag="--to")
    with pytest.raises(EngineError) as caught, address.speaking(ValueError):
        raise ValueError(f"can't use {address.location} and {address.token}\nor s3cret")
    assert str(caught.value).startswith(f"{address.shown}: can't use ")
    assert "s3c" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "words",
    [
        ["index", "run", "--too", "postgresql://u:s3cret@h/db"],
        ["index", "run", "data", "postgresql://u:s3@cret@h/db", "--to"],
        ["serve", "run", "--index", "milvus://u:s3cret@h/db", "--prot", "3"],
    ],
)
def test_a_mistyped_command_shows_no_password(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = "".join(capsys.readouterr())
    assert "s3cret" not in said.replace("@", "")
    assert said.startswith("nofuss: ")


@pytest.mark.parametrize(
    "name", ["/a/b.jpg", "50%.png", "100%25", "not utf-8 \udcff\udc80%FF", "ü★"]
)
def test_file_names_survive_a_database(name: str) -> None:
    assert from_utf8(to_utf8(name)) == name
    to_utf8(name).encode()
    assert 0 <= number_of(name) < 2**63


def test_an_engine_that_forgets_something_can_not_be_made() -> None:
    wanted = {"search", "put", "delete", "count", "close"}
    assert Engine.__abstractmethods__ >= wanted
    assert not Milvus.__abstractmethods__
    assert not Postgres.__abstractmethods__
