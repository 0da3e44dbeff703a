"""Marks, lessons and judgements through the real server: what they do, and what is refused."""

import csv
import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nofuss
from nofuss.data.corrections import FILE as CORRECTIONS
from nofuss.data.corrections import Correction, read_corrections, write_corrections
from nofuss.files import digest, locked
from nofuss.run.marks import read_marks
from nofuss.search.handlers import MAX_CONTENT
from nofuss.search.page.server import build_app
from nofuss.search.shelf import open_shelf
from tests.search.serving import Answer, Server, serving
from tests.search.test_server import OTHER_HOSTS

JSON = {"Content-Type": "application/json"}
ORIGINS = ["http://evil.example", "null", "https://127.0.0.1:{port}"]


@pytest.fixture(scope="module")
def run(taught_run: Path) -> Path:
    return taught_run


@pytest.fixture(scope="module")
def server(taught_server: Server) -> Server:
    return taught_server


def tell(server: Server, path: str, content: Any, **options: Any) -> Answer:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = JSON | options.pop("headers", {})
    return server.request(path, method="POST", body=body, headers=headers, **options)


def search(server: Server, options: str) -> Any:
    answer = server.request(f"/api/search?{options}")
    assert answer.status == 200, answer.body
    return answer.json


def distances(found: Any) -> dict[str, float]:
    return {result["key"]: result["distance"] for result in found["results"]}


# ---- what they do


def test_marks_are_taken_back_and_exported(server: Server, run: Path) -> None:
    found = search(server, f"item={server.item(9)}&k=3")
    query, (a, b, _) = {"like": found["query"]["key"]}, found["results"]
    marks = [{"item": a["key"], "same": True}, {"item": b["key"], "same": False}]
    tell(server, "/api/marks", {"query": query, "marks": marks})
    state = tell(
        server, "/api/marks", {"query": query, "marks": [{"item": a["key"], "same": None}]}
    )
    assert state.json["marks"] == {b["key"]: False}
    answer = server.request("/api/marks.csv")
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert len(rows) == len(read_marks(run))
    assert {row["same"] for row in rows} <= {"same", "not the same"}
    assert str(run.parent).encode() not in answer.body  # no path of this disk
    assert rows[-1]["query"].endswith(found["query"]["name"])


# ---- who may ask


@pytest.fixture(scope="module")
def routes(run: Path) -> list[tuple[str, str]]:
    """Every route of the application, as it lists them, with every method it takes."""
    app: Any = build_app(open_shelf(run), host="127.0.0.1", port=1, token="x").app
    found = [(m, route.path) for route in app.routes for m in sorted(route.methods or ())]
    assert len(found) > 20
    return [(method, path.format(key=0)) for method, path in found]


def test_every_route_is_behind_the_guard(server: Server, routes: list[tuple[str, str]]) -> None:
    """Token, Host and Origin, before anything looks at path, method or body."""
    strangers: list[dict[str, Any]] = [
        {"signed_in": False},
        {"signed_in": False, "headers": JSON | {"Cookie": f"nofuss-{server.port}=guess"}},
        *({"headers": JSON | {"Origin": o.format(port=server.port)}} for o in ORIGINS),
        *({"headers": JSON | {"Sec-Fetch-Site": s}} for s in ("cross-site", "same-site")),
        *({"host": host.format(port=server.port)} for host in OTHER_HOSTS),
    ]
    for (method, path), options in itertools.product(routes, strangers):
        answer = server.request(path, method=method, body=b"{}", **options)
        assert answer.status in (400, 403), (method, path, options)
        assert b"results" not in answer.body


def test_strangers_leave_no_trace(server: Server, run: Path) -> None:
    def state() -> dict[str, str]:
        files = [p for p in run.rglob("*") if p.is_file()]
        return {str(p): digest(p.read_bytes()) for p in files}

    before, key = state(), search(server, f"item={server.item(0)}&k=1")
    query = {"like": key["query"]["key"]}
    marks = {"query": query, "marks": [{"item": key["results"][0]["key"], "same": True}]}
    label = {"item": query["like"], "label": "red"}
    for path, content in (("marks", marks), ("learn", marks), ("undo", {}), ("suspects", label)):
        evil = {"Origin": "http://evil.example"}
        assert tell(server, f"/api/{path}", content, signed_in=False).status == 403
        assert tell(server, f"/api/{path}", content, headers=evil).status == 403
        # What a form of another site can send without being asked first.
        plain = server.request(
            f"/api/{path}",
            method="POST",
            body=json.dumps(content).encode(),
            headers={"Content-Type": "text/plain"},
        )
        assert plain.status == 415
    assert state() == before


# ---- what is sent

BAD_BODIES: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"<script>",
    "half of it": b'{"query": {"like"',
    "a list": [],
    "a number": 7,
    "nested": b"[" * 30_000,
    "not text": b"\xff\xfe{}",
    "NaN": b'{"query": NaN}',
    "no query": {"marks": []},
    "query is text": {"query": "x", "marks": [], "item": "x"},
    "no such item": {"query": {"like": "0" * 16}, "marks": [], "item": "0" * 16},
    "item is a path": {"query": {"like": "../../etc/passwd"}, "item": "/etc/passwd"},
    "item is a list": {"query": {"like": ["0"]}, "item": ["0"]},
    "vector is text": {"query": {"vector": "<b>"}, "item": {}},
    "vector of another model": {"query": {"vector": "00000000.0000000000000000.AAAA"}},
    "vector is null bytes": {"query": {"vector": "\0" * 100}},
}


@pytest.mark.parametrize("path", ["marks", "suspects"])
@pytest.mark.parametrize("content", BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_bodies_get_one_line(server: Server, path: str, content: Any) -> None:
    answer = tell(server, f"/api/{path}", content)
    assert answer.status in (400, 404), answer.body
    assert "\n" not in answer.json["error"]
    assert "Traceback" not in answer.json["error"]


def test_bad_marks_are_refused_as_a_whole(server: Server, run: Path) -> None:
    found = search(server, f"item={server.item(5)}&k=2")
    query, key = {"like": found["query"]["key"]}, found["results"][0]["key"]
    before = len(read_marks(run))
    good = {"item": key, "same": True}
    for bad in (
        {"item": key, "same": "yes"},
        {"item": key},
        {"item": "0" * 16, "same": True},
        {"item": query["like"], "same": True},
        7,
        None,
    ):
        assert tell(server, "/api/marks", {"query": query, "marks": [good, bad]}).status in (
            400,
            404,
        )
    for many in ([], [good] * 501, {"0": good}, "x" * 10):
        assert tell(server, "/api/marks", {"query": query, "marks": many}).status == 400
    assert len(read_marks(run)) == before
    large = tell(server, "/api/marks", b" " * (MAX_CONTENT + 1))
    assert large.status == 413
    assert "over 64 KB" in large.json["error"]


def test_labels_that_do_not_exist_are_refused(server: Server, run: Path) -> None:
    key = search(server, f"item={server.item(0)}&k=1")["query"]["key"]
    for label in ("nobody", "", 7, ["red"], {"a": 1}, "red\0"):
        answer = tell(server, "/api/suspects", {"item": key, "label": label})
        assert answer.status == 400, label
    assert server.request("/api/about").status == 200


def test_a_run_that_is_being_written_says_so(server: Server, run: Path) -> None:
    """By training or indexing: nothing is lost, and one line says who writes."""
    key = search(server, f"item={server.item(0)}&k=1")["query"]["key"]
    with locked(run):
        for path, content in (
            ("learn", {"query": {"like": key}}),
            ("undo", {}),
            ("suspects", {"item": key, "label": "red"}),
        ):
            answer = tell(server, f"/api/{path}", content)
            assert answer.status == 409, (path, answer.body)
            assert "is being written by process" in answer.json["error"]


def test_files_that_can_not_be_used_are_one_line(server: Server, run: Path) -> None:
    found = search(server, f"item={server.item(0)}&k=1")
    query = {"like": found["query"]["key"]}
    marks = [{"item": found["results"][0]["key"], "same": True}]
    kept, file = (run / "marks.jsonl").read_bytes(), run / "marks.jsonl"
    file.unlink()
    os.mkfifo(file)  # opening it must not wait for a writer
    try:
        for answer in (
            tell(server, "/api/marks", {"query": query, "marks": marks}),
            tell(server, "/api/learn", {"query": query}),
            server.request(f"/api/marks?like={query['like']}"),
            server.request("/api/marks.csv"),
        ):
            assert answer.status == 507
            assert "can't be used (not a regular file)" in answer.json["error"]
    finally:
        file.unlink()
        file.write_bytes(kept)


def test_corrections_add_up_to_those_that_the_run_was_trained_with(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 6)
    vectors = random.normal(size=(6, 8))[labels] + 0.1 * random.normal(size=(36, 8))
    np.savez(tmp_path / "x.npz", vectors=vectors.astype(np.float32), labels=labels)
    learned = Correction(f"{tmp_path / 'x.npz'}#0", "0", "1")
    write_corrections(tmp_path / "first.csv", [learned])
    run = tmp_path / "run"
    settings = {"test_fraction": 0.0, "epochs": 0, "out": run}
    nofuss.train(tmp_path / "x.npz", corrections=tmp_path / "first.csv", **settings)
    with serving(run) as server:
        some = search(server, f"item={server.item(3)}&k=35")["results"]
        (first,) = (item for item in some if item["name"].endswith("#0"))
        (other,) = (item for item in some if item["name"].endswith("#7"))
        assert first["label"] == "1", "as corrected"

        def judge(item: dict[str, Any], label: str | None) -> list[Correction]:
            tell(server, "/api/suspects", {"item": item["key"], "label": label})
            return read_corrections(run / CORRECTIONS)

        names = [said.item for said in judge(other, "4")]
        assert [Path(name).name for name in names] == ["x.npz#0", "x.npz#7"]
        said = judge(first, "2")[0]
        assert (said.label, said.corrected) == ("0", "2"), "the data have the label from before"
        assert judge(first, None)[0] == learned
        assert [said.corrected for said in judge(other, None)] == ["1"]
