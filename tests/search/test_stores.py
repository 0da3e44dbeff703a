"""An index in real databases, through the command line and through the page's server.

Skipped for a database that is not installed: pip install 'nofuss[servers]'. What a database must do
is what the run's own index does, so that is what it is compared with.
"""

import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from nofuss.cli import main
from nofuss.errors import StoreError
from nofuss.geometry import normalize
from nofuss.search.filter import Condition, parse_filter
from nofuss.search.index import Index
from nofuss.search.stores import Item, Note, Record, Store, open_store
from nofuss.search.stores.exactness import recall
from nofuss.search.stores.store import About
from tests.search.serving import serving
from tests.search.test_filter import COLUMNS, LABELS, TYPES, conditions
from tests.tiny_run import CLASSES, draw, train_pictures
from torture import kill_index
from torture.databases import ENGINES, IN_URL, PASSWORD, missing, running

pytestmark = pytest.mark.slow
_number = itertools.count()


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


def opened(url: str) -> "closing[Store]":
    return closing(open_store(url, flag="--index"))


def search(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What `nofuss search --json` says of all items beside three pictures, sorted by path."""
    capsys.readouterr()
    pictures = [str(run.parent / "data" / name / "0<i>.png") for name in CLASSES[:3]]
    assert main(["search", str(run), *pictures, "--json", "-k", "40", *words]) == 0
    found = []
    for query in json.loads(capsys.readouterr().out)["queries"]:
        distances = [neighbour["distance"] for neighbour in query["neighbours"]]
        assert distances == sorted(distances)
        for neighbour in sorted(query["neighbours"], key=lambda n: n["path"]):
            distance = pytest.approx(neighbour["distance"], abs=1e-3)
            found.append({**neighbour, "row": None, "distance": distance, "of": query["query"]})
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
    with opened(url) as store:
        before = dict(zip(*next(store.chunks(9)), strict=True))
    assert main(words) == 0  # the same again changes nothing
    table.write_text("path,label,price\nnew/0.png,a,7.5\nnew/1.png,b,1\n")
    draw(4, 99).save(tmp_path / "new" / "1.png")
    capsys.readouterr()
    assert main(words) == 0
    assert (
        "1 changed, 1 removed, 1 with new labels or columns: 2 items in" in capsys.readouterr().out
    )
    with opened(url) as store:
        assert {(r.item.label, r.item.cells["price"]) for r in store.records()} == {
            ("a", 7.5),
            ("b", 1.0),
        }
        after = dict(zip(*next(store.chunks(9)), strict=True))
        same = [number for number in after if torch.equal(after[number], before[number])]
        assert len(same) == 1
    assert main([*words[:3], "--remove", "--to", url]) == 0
    with opened(url) as store:
        assert len(store) == 0
        assert store.sources() == {}
    assert main([*words[:3], "--remove", "--to", url]) == 2


def test_what_does_not_fit_is_refused_in_one_line(
    url: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.parent / "data"
    picture = str(data / "plain" / "again.png")
    assert main(["search", str(run), picture, "--index", url]) == 2
    assert "no index in" in capsys.readouterr().err
    dim = 8
    for about, reason in (
        (About("another", dim), "was made by another model than"),
        (About("another", 5), "holds vectors of 5 dimensions, but the model gives 8"),
        (About("another", dim, "cosine"), "is searched by another distance ('cosine', not"),
        (About("another", dim, format=9), "is of format 9, expected 1"),
    ):
        other = url.replace(".db", f"{about.dim}{about.format}{about.metric[0]}.db")
        if other == url:
            other += f"_{about.dim}{about.format}{about.metric[0]}"
        with opened(other) as store:
            store.create(about)
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
        assert len(server.request("/api/map").json["rows"]) == 31
        assert server.request("/api/items/12345").status == 404
        assert server.request("/api/some", signed_in=False).status == 403
        again = server.request(f"/api/search?like={items[0]['key']}&k=3").json
        assert again["query"]["item"] == item
        assert server.request("/api/suspects").status == 409  # of the run's own index only
        only = quote(CLASSES[3])
        answer = server.request(f"/api/search?item={item}&class={only}&k=50").json
        assert {result["label"] for result in answer["results"]} == {CLASSES[3]}


@pytest.fixture(scope="module")
def filtered(server: str) -> Iterator[tuple[Store, Index]]:
    """The items of test_filter.py in a database and in memory."""
    vectors = normalize(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    names = [str(i) for i in range(6)]
    local = Index.build(vectors, names=names, labels=LABELS, columns=COLUMNS)
    with opened(server.format("filtered")) as store:
        store.create(About("made", 6))
        store.declare("made", {name: column.type for name, column in COLUMNS.items()})
        items = local.items(range(6))
        store.put([Record(item, Note("made", 0, 0, "", "")) for item in items], vectors)
        store.finish()
        yield store, local


@pytest.mark.fuzz
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(condition=conditions())
def test_filters_mean_the_same_everywhere(
    filtered: tuple[Store, Index], condition: Condition
) -> None:
    store, local = filtered
    _, rows = local.search(local.vectors[:1], 6, where=condition)
    _, numbers = store.search(local.vectors[:1], 6, where=condition)
    found = [item.name for item in store.items([n for n in numbers[0].tolist() if n >= 0])]
    assert found == [local.names[row] for row in rows[0].tolist()]


def test_types_are_those_that_were_declared(filtered: tuple[Store, Index]) -> None:
    store, local = filtered
    assert store.types == local.types == {n: t for n, t in TYPES.items() if n != "unit price"}
    assert store.classes == local.classes
    parse_filter("price<20 and sale", store.types)
    assert recall(store, k=3) == 1.0


def test_names_of_any_bytes_and_columns_of_any_name(url: str) -> None:
    vectors = normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    names = ["/a/not utf-8 \udcff.jpg", "/a/50%25.jpg", "/a/'; DROP TABLE t; --"]
    hostile = "x\"]; ' ü 😀 {} %s"
    with opened(url) as store:
        store.create(About("made", 4))
        store.declare("so'urce \udc80", {hostile: "text"})
        notes = [Note("so'urce \udc80", i, i, "d", "f") for i in range(3)]
        items = [Item(names[i], None, {hostile: f"{i}"}) for i in range(3)]
        records = [Record(item, note) for item, note in zip(items, notes, strict=True)]
        store.put(records, vectors)
        store.put(records, vectors)  # twice is once
        store.finish()
        assert sorted(store.records()) == sorted(records)
        assert store.notes("so'urce \udc80", ()) == dict(zip(names, notes, strict=True))
        assert store.notes("another", names[:1]) == {names[0]: notes[0]}
        where = parse_filter("`" + hostile + "` == '1'", store.types)
        _, numbers = store.search(vectors[:1], 3, where=where)
        assert [item.name for item in store.items(numbers[0, :1].tolist())] == [names[1]]
        assert numbers[0].tolist()[1:] == [-1, -1]
        store.discard([names[0], "not there"])
        assert len(store) == 2
        with pytest.raises(KeyError):
            store.items([12345])


def test_a_table_of_somebody_else_is_left_alone(server: str, run: Path) -> None:
    if not server.startswith("postgresql"):
        pytest.skip("made with SQL")
    import psycopg

    with psycopg.connect(server.split("?")[0], autocommit=True) as connection:
        connection.execute("CREATE TABLE birds (id int)")
    complaint = "the table exists, but nofuss did not make it"
    with opened(server.format("birds")) as store, pytest.raises(StoreError, match=complaint):
        _ = store.about


def test_an_index_that_is_gone_is_a_line(url: str) -> None:
    with opened(url) as store, pytest.raises(StoreError):
        len(store)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_index_is_completed(engine: str) -> None:
    """As in `python -m torture --only index`, which kills more often."""
    if reason := missing(engine):
        pytest.skip(reason)
    for tally in kill_index.campaign(engine, kills=1, seed=1):
        assert tally.complaints == []
    assert tally.kills == 1
    assert tally.finished >= 1
