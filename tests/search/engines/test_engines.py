"""An index in real databases, through the command line and through the page's server.

Skipped for a database that is not installed: pip install 'nofuss[servers]'. What a database must do
is what the run's own index does, so that is what it is compared with.
"""

import csv
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from nofuss.cli import main
from nofuss.errors import EngineError, RunError
from nofuss.geometry import normalize
from nofuss.model.saved import model_digest
from nofuss.search.engines import open_engine
from nofuss.search.engines.url import read_url
from nofuss.search.filter import Condition, parse_filter
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Index, Item, key_of, number_of
from nofuss.search.update import recall
from tests.search.serving import serving
from tests.search.test_filter import COLUMNS, LABELS, TYPES, conditions
from tests.tiny_run import CLASSES, draw, train_pictures
from torture import kill_index
from torture.databases import ENGINES, IN_URL, PASSWORD, frozen, missing, running

pytestmark = pytest.mark.slow
_number = itertools.count()
Stopped = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module", params=ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a database, with {} for a name."""
    if reason := missing(request.param):
        pytest.skip(reason)
    with running(request.param, tmp_path_factory.mktemp("database")) as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    """An address that nothing is at yet."""
    return server.format(f"t{next(_number)}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pictures(tmp_path_factory.mktemp("stores"))


def table_of(data: Path) -> Path:
    with (data / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "price", "shop"])
        for i, picture in enumerate(sorted(data.rglob("*.png"))):
            row = (picture.relative_to(data), picture.parent.name, i if i % 4 else "")
            table.writerow((*row, ("north", 'it\'s "so"')[i % 2]))
    return data / "list.csv"


def opened(url: str, about: About, *, create: bool = False) -> "closing[Index]":
    return closing(open_engine(url, about, create=create))


def about_of(run: Path) -> About:
    return About(model_digest(run / "model"), 8)


def search(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What `nofuss search --json` says of all items beside three pictures, sorted by path."""
    capsys.readouterr()
    pictures = [str(run.parent / "data" / name / "0<i>.png") for name in CLASSES[:3]]
    assert main(["search", str(run), *pictures, "--json", "-k", "40", *words]) == 0
    found = []
    for query in json.loads(capsys.readouterr().out)["queries"]:
        distances = [neighbour["distance"] for neighbour in query["neighbours"]]
        assert distances == sorted(distances)
        said = {name: query[name] for name in ("query", "match", "sentence")}
        for neighbour in sorted(query["neighbours"], key=lambda n: n["path"]):
            distance = pytest.approx(neighbour["distance"], abs=1e-3)
            found.append({**neighbour, "distance": distance, **said})
    return found


def test_a_database_answers_as_the_runs_own_index(
    url: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(run.parent / "data")
    assert main(["index", str(run), str(table)]) == 0
    assert main(["index", str(run), str(table), "--to", url]) == 0
    said = capsys.readouterr().out
    assert "31 new: 31 items in" in said
    assert "recall@10 against exact search: 100.0% on 31 of its items" in said
    for where in ("", "price<20 and shop=='it\\'s \"so\"'", "price is null", "label in ('plain')"):
        words = ("--where", where) if where else ()
        found, expected = search(run, capsys, "--index", url, *words), search(run, capsys, *words)
        assert found
        assert found == [row | {"distance": row["distance"].expected} for row in expected]
        assert {row["match"] for row in found} <= ({"unknown"} if where else {"good", "unsure"})


def test_only_what_changed_is_embedded(
    url: str, tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        (tmp_path / "new").mkdir(exist_ok=True)
        draw(i, 50 + i).save(tmp_path / "new" / f"{i}.png")
    table = tmp_path / "list.csv"
    table.write_text("path,label,price\n" + "".join(f"new/{i}.png,a,{i}\n" for i in range(3)))
    words = ["index", str(run), str(table), "--to", url]
    assert main(words) == 0
    with opened(url, about_of(run)) as index:
        before = {item.name: item.vector for item in index.items(vectors=True)}
    assert main(words) == 0  # the same again changes nothing
    table.write_text("path,label,price\nnew/0.png,a,7.5\nnew/1.png,b,1\n")
    draw(4, 99).save(tmp_path / "new" / "1.png")
    capsys.readouterr()
    assert main(words) == 0
    assert (
        "1 changed, 1 removed, 1 with new labels or columns: 2 items in" in capsys.readouterr().out
    )
    with opened(url, about_of(run)) as index:
        items = list(index.items(vectors=True))
        assert {(item.label, item.columns["price"]) for item in items} == {("a", 7.5), ("b", 1.0)}
        same = [torch.equal(item.vector, before[item.name]) for item in items]  # type: ignore[arg-type]
        assert sorted(same) == [False, True]
    table.write_text("path,label,price\nnew/0.png,a,dear\nnew/1.png,b,cheap\n")
    assert main(words) == 0  # another type, in its only source
    with opened(url, about_of(run)) as index:
        assert {item.columns["price"] for item in index.items()} == {"dear", "cheap"}
        assert index.about.types == {"label": "text", "price": "text"}
    assert main([*words[:3], "--remove", "--to", url]) == 0
    with opened(url, about_of(run)) as index:
        assert index.count() == 0
        assert index.about.sources == {}
    assert main([*words[:3], "--remove", "--to", url]) == 2


def test_what_does_not_fit_is_refused_in_one_line(
    url: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.parent / "data"
    picture = str(data / "plain" / "again.png")
    assert main(["search", str(run), picture, "--index", url]) == 2
    assert "no index in" in capsys.readouterr().err
    for about, reason in (
        (About("another", 8), "was made by another model than"),
        (About("another", 5), "holds vectors of 5 dimensions, but the model gives 8"),
        (About("another", 8, format=9), "is of format 9, expected 3"),
    ):
        name = f"{about.dim}{about.format}"
        other = url.replace(".db", f"{name}.db") if ".db" in url else f"{url}_{name}"
        with suppress(RunError), opened(other, about, create=True):
            pass  # it is not opened, but it is there
        for words in (["index", str(run), str(data), "--to"], ["search", str(run), picture]):
            flag = [] if words[0] == "index" else ["--index"]
            assert main([*words, *flag, other]) == 2
            said = capsys.readouterr().err
            assert reason in said
            assert len(said.splitlines()) == 1


def test_no_password_is_ever_shown(
    server: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when all goes well, nor with a wrong password, a closed port or --debug."""
    if PASSWORD not in server and IN_URL not in server:
        pytest.skip("a file has no password")
    url = server.format("secret")
    port = url.split("@")[1].split("/")[0].split(":")[1]
    wrong = url.replace(IN_URL, "Wr0ng%2FOne")
    closed = url.replace(f":{port}/", ":1/")
    outputs = []
    for address in (url, wrong, closed):
        for extra in ([], ["--debug"]):
            words = ["index", str(run), str(run.parent / "data"), "--to", address, *extra]
            done = subprocess.run(
                [sys.executable, "-m", "nofuss", *words], capture_output=True, text=True
            )
            assert (done.returncode == 0) == (address == url)
            outputs.append(done.stdout + done.stderr)
            if address != url and not extra:
                assert len(done.stderr.splitlines()) == 1
    files = [path.read_bytes().decode("latin-1") for path in run.rglob("*") if path.is_file()]
    for text in (*outputs, *files):
        for secret in (PASSWORD, IN_URL, "Wr0ng/One", "Wr0ng%2FOne"):
            assert secret not in text


def test_the_page_searches_in_a_database(url: str, run: Path) -> None:
    table = table_of(run.parent / "data")
    assert main(["index", str(run), str(table), "--to", url]) == 0
    with serving(run, "--index", url) as server:
        about = server.request("/api/about").json
        assert about["columns"] == {"price": "number", "shop": "text"}
        assert about["items"] == 31
        items = server.request("/api/some").json["results"]
        assert len(items) == 12
        item = items[0]["item"]
        where = quote("price<20 and shop=='north'")
        answer = server.request(f"/api/search?item={item}&where={where}&k=50").json
        assert answer["query"]["item"] == item
        assert 0 < len(answer["results"]) < 31
        assert all(float(result["columns"]["price"]) < 20 for result in answer["results"])
        picture = server.request(f"/pictures/{answer['results'][0]['item']}")
        assert picture.headers["content-type"].startswith("image/")
        assert len(server.request("/api/map").json["items"]) == 31
        assert server.request("/api/search?item=12345").status == 404
        assert server.request("/api/some", signed_in=False).status == 403
        assert server.request("/api/labels").status == 409  # of the run's own index only
        only = quote(CLASSES[3])
        answer = server.request(f"/api/search?item={item}&class={only}&k=50").json
        assert {result["label"] for result in answer["results"]} == {CLASSES[3]}
        # It may have classes that its sample has not: a name is asked for as it is.
        answer = server.request(f"/api/search?item={item}&class=nobody")
        assert (answer.status, answer.json["results"]) == (200, [])


@pytest.fixture(scope="module")
def filtered(server: str) -> Iterator[tuple[Index, FolderIndex]]:
    """The items of test_filter.py in a database and in memory."""
    vectors = normalize(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    names = [str(i) for i in range(6)]
    local = FolderIndex.build(vectors, names=names, labels=LABELS, columns=COLUMNS)
    with opened(server.format("filtered"), About("", 6), create=True) as index:
        index.commit(local.about, source="Python")
        index.put(list(local.items(vectors=True)))
        index.commit(local.about)
        yield index, local


@pytest.mark.fuzz
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(condition=conditions())
def test_filters_mean_the_same_everywhere(
    filtered: tuple[Index, FolderIndex], condition: Condition
) -> None:
    index, local = filtered
    [expected] = local.search(local.vectors[:1], 6, where=condition)
    [found] = index.search(local.vectors[:1], 6, where=condition)
    assert found.names == expected.names
    assert found.distances == pytest.approx(expected.distances, abs=1e-3)


def test_a_database_holds_what_the_folder_does(filtered: tuple[Index, FolderIndex]) -> None:
    index, local = filtered
    assert index.about == local.about
    assert index.about.types == {n: t for n, t in TYPES.items() if n != "unit price"}
    parse_filter("price<20 and sale", index.about.types)
    assert index.count() == local.count()
    assert sorted(index.sample(9)) == sorted(local.names)
    assert len(set(index.sample(4, seed=3))) == 4
    of_python = list(local.items())
    assert sorted(index.items()) == sorted(of_python)  # type: ignore[type-var]
    assert index.get(["3", "gone", "1"]) == [of_python[3], of_python[1]]
    assert [index.find(key_of(name)) for name in ("3", "gone")] == ["3", None]
    assert index.find("../etc/passwd") is None
    assert recall(index, k=3) == 1.0


def test_names_of_any_bytes_and_columns_of_any_name(url: str) -> None:
    vectors = normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    names = ["/a/not utf-8 \udcff.jpg", "/a/50%25.jpg", "/a/'; DROP TABLE t; --"]
    hostile, source = "x\"]; ' ü 😀 {} %s", "so'urce \udc80"
    about = About("made", 4, {source: {hostile: "text"}})
    items = [Item(names[i], None, {hostile: f"{i}"}, source, "d") for i in range(3)]
    with opened(url, about, create=True) as index:
        index.commit(about, source=source)
        whole = [item._replace(vector=v) for item, v in zip(items, vectors, strict=True)]
        index.put(whole)
        index.put(whole)  # twice is once
        index.commit(about)
        assert index.about == about
        assert sorted(index.items()) == sorted(items)  # type: ignore[type-var]
        assert sorted(index.items(source)) == sorted(items)  # type: ignore[type-var]
        assert list(index.items("another")) == []
        assert index.get(names) == items
        assert [index.find(key_of(name)) for name in names] == names
        index.put([items[0]._replace(label="new")])  # without a vector the former one stays
        [revised] = index.get(names[:1], vectors=True)
        assert revised.label == "new"
        assert revised.vector is not None
        torch.testing.assert_close(revised.vector, vectors[0])
        where = parse_filter("`" + hostile + "` == '1'", index.about.types)
        [hits] = index.search(vectors[:1], 3, where=where)
        assert hits.names == [names[1]]
        index.delete([names[0], "not there"])
        assert index.count() == 2
        assert index.get(names[:1]) == []


def test_a_process_that_knows_less_leaves_the_others_sources_alone(url: str) -> None:
    about = About("made", 4)
    with opened(url, about, create=True) as index:
        index.commit(about._replace(sources={"a": {"price": "number"}}), source="a")
        index.commit(about._replace(sources={"b": {}}), source="b")  # it has not seen a
        index.commit(about)
        assert index.about.sources == {"a": {"price": "number"}, "b": {}}
        index.commit(about, source="a")
        assert index.about.sources == {"b": {}}


def test_several_commands_write_one_index_at_once(url: str, run: Path, tmp_path: Path) -> None:
    """Parts of the data, each by a process of its own: the union is complete."""
    parts, expected = [], set[str]()
    for part in range(4):
        folder = tmp_path / f"part{part}" / "class"
        folder.mkdir(parents=True)
        for i in range(20):
            draw(i % 6, 100 * part + i).save(folder / f"{i}.png")
            expected.add(str(folder / f"{i}.png"))
        parts.append(folder.parent)
    program = [sys.executable, "-m", "nofuss", "index", str(run)]
    writers = [subprocess.Popen([*program, str(part), "--to", url]) for part in parts]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0, 0]
    with opened(url, about_of(run)) as index:
        assert {item.name for item in index.items()} == expected
        assert {*index.about.sources} == {str(part) for part in parts}
        assert index.count() == len(expected)


NAME = "has a name that is not its own"
KIND = "has a field of another kind"
AS_WRITTEN: dict[str, Any] = {"price": 7.5}
ROW: dict[str, Any] = {
    "name": "a",
    "label": "x",
    "source": "s",
    "digest": "d",
    "columns": AS_WRITTEN,
    "embedding": [1.0, 0.0, 0.0, 0.0],
    "features": "",
}
# What a row holds instead, and either the complaint or the columns that are left.
HOSTILE_ROWS: dict[str, tuple[dict[str, Any], object]] = {
    "another's name": ({"name": "b"}, NAME),
    "a name of other bytes": ({"name": "%FF%ZZ%"}, NAME),
    "a long name": ({"name": "a" * 60_000}, NAME),
    "a label of control characters": ({"label": "\x1b[31m\r\n"}, AS_WRITTEN),
    "a list as columns": ({"columns": []}, KIND),
    "a text as columns": ({"columns": "{"}, KIND),
    "no columns": ({"columns": {}}, {}),
    "a text as a number": ({"columns": {"price": "dear"}}, {}),
    "null as a number": ({"columns": {"price": None}}, {}),
    "a number that a float holds": ({"columns": {"price": 1e300}}, {"price": 1e300}),
    "an unknown column": ({"columns": {"other": {"a": 1}, "label": "x", "": ""}}, {}),
    "a long vector": ({"embedding": [3, 4, 0, 0]}, KIND),
    "a huge vector": ({"embedding": [1e30, 0, 0, 0]}, KIND),
    "features of no bytes": ({"features": "<b>"}, KIND),
    "features of a byte": ({"features": "AA=="}, KIND),
    "long features": ({"features": "AEAAAA=="}, KIND),
}
ABOUT = "what it says of itself can't be used"
# What the row of the index says instead of what was written, or all of it.
HOSTILE_ABOUT: dict[str, tuple[Any, str]] = {
    "a list": ([], "is of format None"),
    "another format": ({"format": 9}, "is of format 9"),
    "a long format": ({"format": "x" * 9999}, "is of format 'xxxxxxxxxx"),
    "a list as model": ({"model": ["made"]}, ABOUT),
    "another model": ({"model": "\x1b[31m"}, "was made by another model"),
    "a bool as dimensions": ({"dim": True}, ABOUT),
    "endless dimensions": ({"dim": 10**18}, ABOUT),
    "a part of a relative": ({"relatives": 1.5}, ABOUT),
    "an unknown rule": ({"open_set": {"rule": "x"}}, ABOUT),
}
HOSTILE_SOURCES: dict[str, Any] = {
    "null": None,
    "an unknown type": {"price": "money"},
    "label as a column": {"label": "text"},
    "brackets": {"price": [[[[[[[[[[]]]]]]]]]]},
}
# Of PostgreSQL only, whose tables can be altered.
HOSTILE_SQL: dict[str, tuple[str, str]] = {
    "bytes as label": ("ALTER TABLE {t} ALTER label TYPE bytea USING 'x'", KIND),
    "a date that Python lacks": (
        "ALTER TABLE {t} ALTER label TYPE timestamp USING 'infinity'", "timestamp too large"
    ),
    "no source": ("ALTER TABLE {t} ALTER source DROP NOT NULL; UPDATE {t} SET source = NULL", KIND),
    "text as id": ("ALTER TABLE {t} ALTER id TYPE text", "operator does not exist"),
    "a fraction as id": ("ALTER TABLE {t} ALTER id TYPE numeric; UPDATE {t} SET id = id - 0.5",
                         NAME),
    "no vector": (
        "ALTER TABLE {t} ALTER embedding DROP NOT NULL; UPDATE {t} SET embedding = NULL", KIND
    ),
    "other dimensions": ("ALTER TABLE {t} ALTER embedding TYPE vector USING '[1,0]'", KIND),
    "no vectors": ("ALTER TABLE {t} DROP embedding", "nofuss .* did not make it"),
    "text as columns": ("ALTER TABLE {t} ALTER columns TYPE text USING '{{'", KIND),
    "nested columns": (
        "UPDATE {t} SET columns = (repeat('[', 5000) || repeat(']', 5000))::jsonb", KIND
    ),
    "a number of 9,000 digits": (
        "UPDATE {t} SET columns = ('{{\"price\": ' || repeat('9', 9000) || '}}')::jsonb", ""
    ),
    "nothing said": ("DELETE FROM {about}", "no row has the key 'index'"),
    "nowhere to say it": ("DROP TABLE {about}", "nofuss .* did not make it"),
    "no key": (
        "ALTER TABLE {about} DROP CONSTRAINT {about}_pkey; "
        "ALTER TABLE {about} ALTER key DROP NOT NULL; UPDATE {about} SET key = NULL", ABOUT
    ),
    "nested text as value": (
        "ALTER TABLE {about} ALTER value TYPE text USING repeat('[', 100000)", ABOUT
    ),
    "a view without end": (
        "DROP TABLE {t}; CREATE VIEW {t} AS SELECT g AS id, 'a' AS name, 'x' AS label, 's' AS "
        "source, 'd' AS digest, '{{}}'::jsonb AS columns, '[1,0,0,0]'::vector AS embedding, "
        "'' AS features FROM generate_series(1, 1000000000000000) AS g",
        "does not answer within|" + NAME
    ),
}  # fmt: skip


class Hostile:
    """An index of one item in which somebody writes by hand."""

    def __init__(self, url: str) -> None:
        self.url, self.about = url, About("made", 4, {"s": {"price": "number"}})
        self.name = read_url(url, flag="--to").name
        with opened(url, self.about, create=True) as index:
            index.commit(self.about, source="s")
            index.put([Item("a", "x", AS_WRITTEN, "s", "d", torch.eye(4)[0])])

    def sql(self, text: str) -> None:
        import psycopg

        with psycopg.connect(read_url(self.url, flag="").location, autocommit=True) as connection:
            connection.execute(text.format(t=self.name, about=f"{self.name}_about").encode())

    def change_row(self, fields: dict[str, Any]) -> None:
        """Write other fields into the row of the item."""
        if self.url.startswith("postgresql"):
            for field, value in fields.items():
                written = value if isinstance(value, str) else json.dumps(value)
                written = json.dumps(value) if field == "columns" else written
                self.sql(f"UPDATE {{t}} SET {field} = {_literal(written)}")
        else:
            self._upsert(self.name, {**ROW, **fields})

    def change_about(self, key: str, value: Any) -> None:
        """Write another value for a key; of the index a dict replaces only what it names."""
        if isinstance(value, dict) and key == "index":
            value = self.about.as_dict() | value
        if self.url.startswith("postgresql"):
            new = _literal(json.dumps(value))
            self.sql(f"UPDATE {{about}} SET value = {new} WHERE key = '{key}'")
            return
        row = {"id": number_of(key), "key": key, "value": value, "embedding": [0.0, 0.0]}
        self._upsert(f"{self.name}_about", row)

    def _upsert(self, collection: str, fields: dict[str, Any]) -> None:
        """Write a row as it is, with the client of an index that has not read it."""
        from pymilvus import MilvusException

        from nofuss.search.engines.milvus import Milvus

        with closing(Milvus(read_url(self.url, flag=""))) as index:
            try:
                index._client.upsert(collection, [{"id": number_of("a"), **fields}])
            except MilvusException as error:
                pytest.skip(f"this database can't hold it: {error}")

    def complaints(self) -> list[str]:
        """What every way to ask says, and nothing but one line of it."""
        said = list[str]()
        try:
            with opened(self.url, self.about) as index:
                for ask in (
                    lambda: list(index.items(vectors=True)),
                    lambda: index.get(["a"], vectors=True),
                    lambda: index.find(key_of("a")),
                    lambda: index.sample(3),
                    lambda: index.search(torch.eye(4)[:1], 3),
                ):
                    try:
                        ask()
                    except EngineError as error:
                        said.append(str(error))
        except (EngineError, RunError) as error:
            said.append(str(error))
        assert all("\n" not in line and len(line) < 500 for line in said)
        return said


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''").replace("{", "{{").replace("}", "}}") + "'"


@pytest.fixture(scope="module")
def once_made(server: str) -> Hostile:
    return Hostile(server.format("hostile"))


@pytest.fixture
def hostile(once_made: Hostile) -> Hostile:
    """As it was made: a collection takes Milvus seconds."""
    once_made.change_row(ROW)
    once_made.change_about("index", once_made.about.as_dict())
    once_made.change_about("source s", once_made.about.sources["s"])
    return once_made


def test_an_index_that_nobody_has_changed_is_read(hostile: Hostile) -> None:
    """A test of the tests below."""
    assert hostile.complaints() == []


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of Milvus Lite, in this process
@pytest.mark.parametrize("row", HOSTILE_ROWS)
def test_what_somebody_wrote_into_a_row_is_one_line(hostile: Hostile, row: str) -> None:
    """Or is left out: what a filter can't find."""
    fields, expected = HOSTILE_ROWS[row]
    hostile.change_row(fields)
    said = hostile.complaints()
    if isinstance(expected, str):
        assert any(expected in line for line in said)
        assert all("which nofuss did not write; index into another name" in line for line in said)
        return
    assert said == []
    with opened(hostile.url, hostile.about) as index:
        assert [item.columns for item in index.items()] == [expected]


@pytest.mark.parametrize("about", HOSTILE_ABOUT)
def test_what_somebody_wrote_of_the_index_is_one_line(hostile: Hostile, about: str) -> None:
    value, complaint = HOSTILE_ABOUT[about]
    hostile.change_about("index", value)
    [said] = hostile.complaints()
    assert complaint in said


@pytest.mark.parametrize("value", HOSTILE_SOURCES)
def test_what_somebody_wrote_of_a_source_is_one_line(hostile: Hostile, value: str) -> None:
    hostile.change_about("source s", HOSTILE_SOURCES[value])
    [said] = hostile.complaints()
    assert ABOUT in said


@pytest.mark.parametrize("sql", HOSTILE_SQL)
def test_what_somebody_made_of_a_table_is_one_line(server: str, url: str, sql: str) -> None:
    if not server.startswith("postgresql"):
        pytest.skip("changed with SQL")
    (text, complaint), hostile = HOSTILE_SQL[sql], Hostile(url)
    hostile.sql(text)
    said = hostile.complaints()
    assert (said == []) == (complaint == "")
    assert not complaint or any(re.search(complaint, line) for line in said)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_vector_that_is_not_a_direction_is_not_an_answer(hostile: Hostile) -> None:
    hostile.change_row({"embedding": [30.0, 40.0, 0.0, 0.0]})
    with opened(hostile.url, hostile.about) as index:

        def search() -> None:
            for _ in range(50):  # Milvus searches what was written some seconds ago
                index.search(torch.eye(4)[:1], 1)
                time.sleep(0.2)

        with pytest.raises(EngineError, match="it answers with a distance of"):
            search()


def test_an_index_that_is_replaced_meanwhile_is_a_line(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hostile.url.endswith(".db"):
        pytest.skip("a file is opened by one process at a time")
    monkeypatch.setattr("nofuss.search.engines.ABOUT_SECONDS", -1.0)
    with opened(hostile.url, hostile.about) as index:
        assert index.get(["a"])
        hostile.change_about("index", {"model": "another"})
        with pytest.raises(EngineError, match="was made by another model"):
            index.get(["a"])


@pytest.fixture
def stopped(server: str) -> Stopped:
    """Stops the database, which still accepts connections, until the block ends."""
    if "@" not in server or sys.platform != "linux":
        pytest.skip("needs a server in a process of its own, and /proc")
    if server.startswith("milvus"):
        pytest.skip("its client asks a stopped server again for a minute, and the server is lost")
    return lambda: frozen(server)


def test_a_database_that_does_not_answer_is_a_line_in_time(
    hostile: Hostile, stopped: Stopped
) -> None:
    """Whatever is asked, by several threads at once, and when connecting; and then it answers."""
    with opened(hostile.url, hostile.about) as index, ThreadPoolExecutor(6) as threads:

        def complaint(ask: Callable[[], object]) -> tuple[str, float]:
            began = time.monotonic()
            with pytest.raises(EngineError) as caught:
                ask()
            return str(caught.value), time.monotonic() - began

        asks: list[Callable[[], object]] = [
            lambda: index.search(torch.eye(4)[:1], 3),
            lambda: index.get(["a"], vectors=True),
            lambda: index.find(key_of("a")),
            lambda: index.sample(3),
            lambda: index.count(),
            lambda: opened(hostile.url, hostile.about),
        ]
        with stopped():
            for said, seconds in threads.map(complaint, asks):
                assert "\n" not in said
                assert seconds < 10
        assert index.get(["a"])
        assert index.count() == 1


def test_the_page_answers_while_its_database_does_not(
    url: str, run: Path, stopped: Stopped
) -> None:
    """45 searches get 503 in time, and what needs no database is answered at once."""
    assert main(["index", str(run), str(run.parent / "data"), "--to", url]) == 0
    with serving(run, "--index", url) as server, ThreadPoolExecutor(45) as threads:
        item = server.request("/api/some").json["results"][0]["item"]

        def search(_: int) -> tuple[int, float]:
            began = time.monotonic()
            return server.request(f"/api/search?item={item}").status, time.monotonic() - began

        assert search(0)[0] == 200
        with stopped():
            answers = threads.map(search, range(45))
            time.sleep(1)
            for path in ("/", "/look.css"):
                began = time.monotonic()
                assert server.request(path).status == 200
                assert time.monotonic() - began < 5  # at once, but for a busy machine
            found = [*answers]
            assert {status for status, _ in found} == {503}
            assert max(seconds for _, seconds in found) < 12  # nine, likewise
        assert search(0)[0] == 200


@pytest.mark.parametrize("engine", [kill_index.FOLDER, *ENGINES])
def test_a_killed_index_is_completed(engine: str, tmp_path: Path) -> None:
    """As in `python -m torture --only databases`, which kills more often."""
    if engine in ENGINES and (reason := missing(engine)):
        pytest.skip(reason)
    cases = list(kill_index.campaign(tmp_path, 1, engines=(engine,), kills=1))
    assert cases
    assert [case.complaints for case in cases] == [[]] * len(cases)
