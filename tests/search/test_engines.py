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
from contextlib import closing, contextmanager
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
from nofuss.search.filter import Condition, parse_filter
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Index, Item, Origin, key_of
from nofuss.search.update import recall
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


def opened(url: str, about: About, *, create: bool = False) -> "closing[Index]":
    return closing(open_engine(url, flag="--index", wanted=about, create=create))


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
        for neighbour in sorted(query["neighbours"], key=lambda n: n["path"]):
            distance = pytest.approx(neighbour["distance"], abs=1e-3)
            found.append({**neighbour, "distance": distance, "of": query["query"]})
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
        (About("another", 8, format=9), "is of format 9, expected 2"),
    ):
        name = f"{about.dim}{about.format}"
        other = url.replace(".db", f"{name}.db") if ".db" in url else f"{url}_{name}"
        opened(other, about, create=True).thing.close()
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
        assert server.request("/api/items/12345").status == 404
        assert server.request("/api/some", signed_in=False).status == 403
        again = server.request(f"/api/search?like={items[0]['key']}&k=3").json
        assert again["query"]["item"] == item
        assert server.request("/api/suspects").status == 409  # of the run's own index only
        only = quote(CLASSES[3])
        answer = server.request(f"/api/search?item={item}&class={only}&k=50").json
        assert {result["label"] for result in answer["results"]} == {CLASSES[3]}


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
    of_python = [item._replace(origin=Origin("", "")) for item in local.items()]
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
    items = [Item(names[i], None, {hostile: f"{i}"}, Origin(source, "d")) for i in range(3)]
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
    if url.endswith(".db"):
        pytest.skip("a file is opened by one process at a time")
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


def test_a_table_of_somebody_else_is_left_alone(server: str) -> None:
    if not server.startswith("postgresql"):
        pytest.skip("made with SQL")
    import psycopg

    with psycopg.connect(server.split("?")[0], autocommit=True) as connection:
        connection.execute("CREATE TABLE birds (id int)")
    with pytest.raises(EngineError, match=r"the table exists, but nofuss .* did not make it"):
        opened(server.format("birds"), About("", 4), create=True)


HOSTILE_ROWS = {
    "name = 'b'": "has a name that is not its own",
    "name = ''": "has a name that is not its own",
    "label = NULL": "",
    "columns = '[]'": "columns that are not a JSON object",
    "columns = '7'": "columns that are not a JSON object",
    "columns = 'null'": "columns that are not a JSON object",
    """columns = '{"price": "dear"}'""": "",
    """columns = '{"price": [1]}'""": "",
    """columns = '{"other": {"a": 1}}'""": "",
    "embedding = '[3,4,0,0]'": "a vector that is not of 4 dimensions and unit length",
    "embedding = '[1e30,0,0,0]'": "a vector that is not of 4 dimensions and unit length",
}
HOSTILE_ABOUT = {
    "'[]'": "is of format None",
    "'{\"format\": 2}'": "its model and dimensions are not",
    "value - 'model'": "its model and dimensions are not",
    'value || \'{"dim": "4"}\'': "its model and dimensions are not",
    "value || '{\"dim\": -4}'": "its model and dimensions are not",
    "value || '{\"relatives\": 1.5}'": "relatives is not a count",
    'value || \'{"open_set": {"rule": "x"}}\'': "open_set that nofuss did not write",
    "value || '{\"open_set\": [1]}'": "open_set that nofuss did not write",
}


@pytest.mark.parametrize(("change", "complaint"), HOSTILE_ROWS.items())
def test_what_somebody_wrote_into_a_row_is_one_line(
    server: str, change: str, complaint: str
) -> None:
    """Or is left out: what a filter can't find."""
    with _changed(server, f"UPDATE hostile SET {change} WHERE name = 'a'") as index:
        if complaint:
            with pytest.raises(EngineError, match=complaint) as caught:
                list(index.items(vectors=True))
            assert "\n" not in str(caught.value)
        else:
            assert [item.columns for item in index.items(vectors=True)] == [{}]


@pytest.mark.parametrize(("value", "complaint"), HOSTILE_ABOUT.items())
def test_what_somebody_wrote_of_the_index_is_one_line(
    server: str, value: str, complaint: str
) -> None:
    update = f"UPDATE hostile_about SET value = {value} WHERE key = 'index'"
    with (
        pytest.raises((EngineError, RunError), match=complaint) as caught,
        _changed(server, update),
    ):
        pass
    assert "\n" not in str(caught.value)


@contextmanager
def _changed(server: str, sql: str) -> Iterator[Index]:
    """An index of one item, after something was changed in it."""
    if not server.startswith("postgresql"):
        pytest.skip("changed with SQL")
    import psycopg

    about = About("made", 4, {"s": {"price": "number"}})
    with psycopg.connect(server.split("?")[0], autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS hostile, hostile_about")
        with opened(server.format("hostile"), about, create=True) as index:
            index.commit(about, source="s")
            index.put([Item("a", "x", {}, Origin("s", "d"), torch.eye(4)[0])])
        connection.execute(sql.encode())
    with opened(server.format("hostile"), about) as index:
        yield index


def test_a_vector_that_is_not_a_direction_is_not_an_answer(server: str) -> None:
    change = "UPDATE hostile SET embedding = '[1e30,0,0,0]'"
    with (
        _changed(server, change) as index,
        pytest.raises(EngineError, match="it answers with a distance of"),
    ):
        index.search(torch.eye(4)[:1], 1)


def test_an_index_that_is_gone_is_a_line(url: str) -> None:
    with pytest.raises(RunError, match="no index in"):
        opened(url, About("", 4))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_index_is_completed(engine: str) -> None:
    """As in `python -m torture --only index`, which kills more often."""
    if reason := missing(engine):
        pytest.skip(reason)
    for tally in kill_index.campaign(engine, kills=1, seed=1):
        assert tally.complaints == []
    assert tally.kills == 1
    assert tally.finished >= 1
