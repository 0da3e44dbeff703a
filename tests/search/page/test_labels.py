"""Feedback and labels through the real server: what they do, and what is refused."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import nofuss
from nofuss.data.corrections import Correction, read_corrections
from nofuss.files import digest, locked
from nofuss.model.saved import model_digest
from nofuss.run.directory import Run
from nofuss.search import Index
from nofuss.search.feedback import FILE, read_feedback
from nofuss.search.page.routes import MAX_CONTENT
from nofuss.search.page.server import build_app
from nofuss.search.page.state import open_state
from nofuss.search.update import update_index
from nofuss.search.verdict import calibrated
from tests.search.page.test_server import encode
from tests.search.serving import Answer, Server, serving
from tests.tiny_run import draw

JSON = {"Content-Type": "application/json"}


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
    return {result["item"]: result["distance"] for result in found["results"]}


# ---- what they do


def files(folder: Path) -> dict[str, str]:
    return {str(p): digest(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_marks_teach_and_are_undone(server: Server, run: Path) -> None:
    while tell(server, "/api/undo", {}).status == 200:  # what other tests have taught this run
        pass
    model = files(run / "model")
    before = search(server, f"item={server.item(3)}&k=100")
    query, results = {"item": before["query"]["item"]}, before["results"]
    wanted = [{"item": r["item"], "same": at > 2} for at, r in enumerate(results[::4])]
    told = tell(server, "/api/feedback", {"query": query, "said": wanted}).json
    assert told["said"] == {mark["item"]: mark["same"] for mark in wanted}
    assert search(server, f"item={query['item']}")["feedback"] == told
    of_other = search(server, f"item={wanted[0]['item']}")["feedback"]["said"]
    assert of_other[query["item"]] is wanted[0]["same"], "of two items it is said once"
    learned = tell(server, "/api/learn", {}).json
    assert (learned["marks"], learned["pairs"]) == (told["count"], told["count"])
    assert server.request("/api/about").json["learned"] == told["count"]
    after = search(server, f"item={server.item(3)}&k=100")
    assert len({each["version"] for each in (before, after)}) == 2

    def gap(found: Any) -> float:
        """How much farther away what is not the same is, on average, than what is."""
        at = distances(found)
        same, other = ([at[m["item"]] for m in wanted if m["same"] is s] for s in (True, False))
        return sum(other) / len(other) - sum(same) / len(same)

    assert gap(after) > gap(before) + 0.01
    vectors = Index.load(run / "index").vectors
    embedded = nofuss.load(run).embed(shown_files(run))
    np.testing.assert_allclose(embedded, vectors[-len(embedded) :], atol=1e-4)
    assert tell(server, "/api/undo", {}).status == 200
    assert distances(search(server, f"item={server.item(3)}&k=100")) == distances(before)
    assert tell(server, "/api/undo", {}).status == 409
    # The marks are still there: they were not undone, only what was learned from them.
    assert search(server, f"item={query['item']}")["feedback"]["said"] == told["said"]
    assert files(run / "model") == model, "the model never changes"


def shown_files(run: Path) -> list[Path]:
    """The pictures that were added to the index last, in its order."""
    return [Path(name) for name in Index.load(run / "index").names[-5:]]


def test_the_address_of_a_picture_outlives_what_is_learned(server: Server) -> None:
    sent = server.upload(encode("PNG", draw(1, 77))).json
    address, results = sent["query"]["vector"], sent["results"]
    said = [{"item": results[at]["item"], "same": True} for at in (0, 3)]
    query = {"vector": address}
    assert tell(server, "/api/feedback", {"query": query, "said": said}).status == 200
    assert search(server, f"vector={address}&k=5")["results"] == results
    assert tell(server, "/api/learn", {}).status == 200
    by_address = search(server, f"vector={address}&k=5")
    again = server.upload(encode("PNG", draw(1, 77))).json
    assert again["query"]["vector"] == address
    assert by_address["results"] == again["results"] != results
    assert set(by_address["feedback"]["said"].values()) == {True}
    assert tell(server, "/api/undo", {}).status == 200
    assert search(server, f"vector={address}&k=5")["results"] == results


def test_marks_are_taken_back(server: Server) -> None:
    found = search(server, f"item={server.item(9)}&k=3")
    query, (a, b, _) = {"item": found["query"]["item"]}, found["results"]
    said = [{"item": a["item"], "same": True}, {"item": b["item"], "same": False}]
    tell(server, "/api/feedback", {"query": query, "said": said})
    back = {"query": query, "said": [{"item": a["item"], "same": None}]}
    assert tell(server, "/api/feedback", back).json["said"] == {b["item"]: False}


def test_a_label_is_corrected_at_once(server: Server, run: Path) -> None:
    def doubt() -> Any:
        found = server.request("/api/labels").json["labels"]
        return next((each for each in found if each["name"] == "red/wrong.png"), None)

    first = doubt()
    assert (first["label"], first["suggested"], first["judged"]) == ("red", "fruit/blue", None)
    assert first["votes"] == sum(n["label"] == "fruit/blue" for n in first["neighbours"])
    said = tell(server, "/api/labels", {"item": first["item"], "label": "fruit/blue"})
    assert said.json == {"judged": "fruit/blue"}
    item = str(run.parent / "data" / first["name"])
    assert read_corrections(run / FILE) == [Correction(item, "red", "fruit/blue")]
    assert search(server, f"item={first['item']}")["query"]["label"] == "fruit/blue"
    found = search(server, f"item={server.item(0)}&class=red&k=100")["results"]
    assert first["item"] not in [each["item"] for each in found]
    near = search(server, f"item={first['item']}&k=1")["results"][0]["item"]
    votes = search(server, f"item={near}&k=10")
    labels = {each["item"]: each["label"] for each in votes["results"]}
    assert labels[first["item"]] == "fruit/blue"
    assert votes["likely"]["votes"] == [*labels.values()].count(votes["likely"]["label"])
    shown = open_state(Run.open(run))
    assert shown.stored.about == calibrated(shown.index, shown.encoder), "the rule goes by it, too"
    assert [doubt()[key] for key in ("label", "judged")] == ["red", "fruit/blue"]
    # It is still listed, so that another judgement can replace it; null withdraws it.
    tell(server, "/api/labels", {"item": first["item"], "label": "red"})
    assert read_corrections(run / FILE) == [Correction(item, "red", "red")]
    assert doubt()["judged"] == "red"
    answer = tell(server, "/api/labels", {"item": first["item"], "label": None})
    assert answer.json == {"judged": None}
    assert read_corrections(run / FILE) == []
    assert doubt() == first


# ---- who may ask


def test_a_form_of_another_site_leaves_no_trace(server: Server, run: Path) -> None:
    """What it can send without being asked first; test_server.py has all other strangers."""
    before, key = files(run), search(server, f"item={server.item(0)}&k=1")
    query = {"item": key["query"]["item"]}
    marks = {"query": query, "said": [{"item": key["results"][0]["item"], "same": True}]}
    label = {"item": query["item"], "label": "red"}
    for path, content in (("feedback", marks), ("learn", {}), ("undo", {}), ("labels", label)):
        plain = {"Content-Type": "text/plain"}
        assert tell(server, f"/api/{path}", content, headers=plain).status == 415
    assert files(run) == before


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
    "no query": {"said": []},
    "query is text": {"query": "x", "said": [], "item": "x"},
    "no such item": {"query": {"item": "0" * 16}, "said": [], "item": "0" * 16},
    "item is a path": {"query": {"item": "../../etc/passwd"}, "item": "/etc/passwd"},
    "item is a list": {"query": {"item": ["0"]}, "item": ["0"]},
    "vector is text": {"query": {"vector": "<b>"}, "item": {}},
    "vector of another model": {"query": {"vector": "0000000000000000.AAAA"}},
    "vector is null bytes": {"query": {"vector": "\0" * 100}},
}


@pytest.mark.parametrize("path", ["feedback", "labels"])
@pytest.mark.parametrize("content", BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_bodies_get_one_line(server: Server, path: str, content: Any) -> None:
    answer = tell(server, f"/api/{path}", content)
    assert answer.status in (400, 404), answer.body
    assert "\n" not in answer.json["error"]
    assert "Traceback" not in answer.json["error"]


def test_bad_marks_are_refused_as_a_whole(server: Server, run: Path) -> None:
    found = search(server, f"item={server.item(5)}&k=2")
    query, key = {"item": found["query"]["item"]}, found["results"][0]["item"]
    before, good = read_feedback(run), {"item": key, "same": True}
    for bad in (
        {"item": key, "same": "yes"},
        {"item": key, "same": 1},
        {"item": key},
        {"item": "0" * 16, "same": True},
        {"item": query["item"], "same": True},
        7,
        None,
    ):
        answer = tell(server, "/api/feedback", {"query": query, "said": [good, bad]})
        assert answer.status in (400, 404)
    for many in ([], [good] * 501, {"0": good}, "x" * 10):
        assert tell(server, "/api/feedback", {"query": query, "said": many}).status == 400
    assert read_feedback(run) == before
    large = tell(server, "/api/feedback", b" " * (MAX_CONTENT + 1))
    assert large.status == 413
    assert "over 64 KB" in large.json["error"]


def test_labels_that_do_not_exist_are_refused(server: Server) -> None:
    key = search(server, f"item={server.item(0)}&k=1")["query"]["item"]
    for label in ("nobody", "", 7, ["red"], {"a": 1}, "red\0"):
        answer = tell(server, "/api/labels", {"item": key, "label": label})
        assert answer.status == 400, label
    assert server.request("/api/about").status == 200


# ---- what goes wrong


def test_a_run_that_is_being_written_says_so(server: Server, run: Path) -> None:
    """By training or indexing: nothing is lost, and one line says who writes."""
    found = search(server, f"item={server.item(0)}&k=1")
    key, other = found["query"]["item"], found["results"][0]["item"]
    with locked(run):
        for path, content in (
            ("learn", {}),
            ("undo", {}),
            ("labels", {"item": key, "label": "red"}),
        ):
            answer = tell(server, f"/api/{path}", content)
            assert answer.status == 409, (path, answer.body)
            assert "is being written by process" in answer.json["error"]
        marks = {"query": {"item": key}, "said": [{"item": other, "same": True}]}
        assert tell(server, "/api/feedback", marks).status == 200, "kept all the same"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / FILE).unlink(missing_ok=True)
    return tmp_path / "run"


@pytest.fixture
def client(copy: Path) -> Iterator[TestClient]:
    """The application in this process, so that its disk can fail."""
    app = build_app(open_state(Run.open(copy)), host="127.0.0.1", port=80, token=None)
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def mark_some(client: TestClient) -> dict[str, Any]:
    """Say of an item that its last results are the same; return the search before."""
    item = client.get("/api/map").json()["items"][3]
    found: dict[str, Any] = client.get(f"/api/search?item={item}&k=100").json()
    said = [{"item": each["item"], "same": True} for each in found["results"][-4:]]
    answer = client.post("/api/feedback", json={"query": {"item": item}, "said": said})
    assert answer.status_code == 200, answer.text
    return found


def test_another_command_has_changed_the_run(client: TestClient, copy: Path) -> None:
    """It is not overwritten: the page shows what is there now, and says so once."""
    mark_some(client)
    (copy.parent / "more" / "red").mkdir(parents=True)
    draw(0, 90).save(copy.parent / "more" / "red" / "new.png")
    update_index(copy, copy.parent / "more")
    before = client.get("/api/about").json()
    answer = client.post("/api/learn", json={})
    assert answer.status_code == 409
    assert "another command has changed this run" in answer.json()["error"]
    assert client.get("/api/about").json()["items"] == before["items"] + 1
    assert client.post("/api/learn", json={}).status_code == 200
    assert client.post("/api/undo", json={}).status_code == 200


class Disk:
    """A disk that fails at its n-th write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.done = 0, 0
        for name in ("fsync", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        real = open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wxa"):
                self.write()
            return real(file, mode, *args, **options)

        monkeypatch.setattr("nofuss.files.open", opened, raising=False)

    def failing(self, action: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.write()
            return action(*args, **options)

        return wrapped

    def write(self) -> None:
        self.done += 1
        if self.done == self.left:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("act", ["feedback", "learn", "undo", "labels"])
def test_an_error_at_every_write_and_the_message_is_true(
    act: str, client: TestClient, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index, map and feedback agree at every moment; "nothing changed" is what it says."""
    found = mark_some(client)
    item = found["query"]["item"]
    if act == "undo":
        assert client.post("/api/learn", json={}).status_code == 200
    marks = [{"item": found["results"][0]["item"], "same": False}]
    content = {
        "feedback": {"query": {"item": item}, "said": marks},
        "labels": {"item": item, "label": "fruit/green"},
    }
    disk, failures = Disk(monkeypatch), 0
    for write in itertools.count(1):
        lines = len(read_feedback(copy).lines)
        before, seen = on_disk(copy), client.get(f"/api/search?item={item}&k=100").json()
        disk.left, disk.done = write, 0
        answer = client.post(f"/api/{act}", json=content.get(act, {}))
        disk.left = 0
        after, shown = on_disk(copy), client.get(f"/api/search?item={item}&k=100").json()
        assert shown["version"] == open_state(Run.open(copy)).version, "the page shows the disk"
        if answer.status_code == 200:
            assert after != before
        else:
            failures += 1
            assert answer.status_code == 507, answer.text
            assert "No space left on device); nothing changed" in answer.json()["error"]
            assert after == before
            assert len(read_feedback(copy).lines) == lines
            shown.pop("searching_ms"), seen.pop("searching_ms")
            assert shown == seen
        if disk.done < write:
            break
        # A write that need not succeed: once more from where it was.
        if answer.status_code == 200 and act in ("learn", "undo"):
            client.post("/api/undo" if act == "learn" else "/api/learn", json={})
    assert failures >= {"feedback": 2, "learn": 5, "undo": 5, "labels": 2}[act]


def on_disk(run: Path) -> tuple[Any, ...]:
    """What is in force, after a look at whether it fits together."""
    index, feedback = Index.load(run / "index"), read_feedback(run)
    in_force = index.manifest.feedback
    assert (index.matrix is not None) == (len(feedback.first(in_force).marks) > 0)
    assert index.manifest.model == model_digest(run / "model")
    vectors = digest(index.vectors.numpy().tobytes())
    return in_force, index.manifest.history, vectors, len(feedback.lines)


def test_files_that_can_not_be_used_are_one_line(server: Server, run: Path) -> None:
    found = search(server, f"item={server.item(0)}&k=1")
    query = {"item": found["query"]["item"]}
    said = [{"item": found["results"][0]["item"], "same": True}]
    assert tell(server, "/api/feedback", {"query": query, "said": said}).status == 200
    kept, file = (run / FILE).read_bytes(), run / FILE
    file.unlink()
    os.mkfifo(file)  # opening it must not wait for a writer
    try:
        for answer in (
            tell(server, "/api/feedback", {"query": query, "said": said}),
            tell(server, "/api/learn", {}),
        ):
            assert answer.status in (409, 507)
            assert "\n" not in answer.json["error"]
            assert "regular file" in answer.json["error"]
    finally:
        file.unlink()
        file.write_bytes(kept)


def test_a_failure_of_ours_is_json_too(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("nofuss.search.page.routes.described", fail)
    answer = client.get("/api/some")
    assert answer.status_code == 500
    assert "its terminal says how" in answer.json()["error"]
    assert "ZeroDivisionError: of ours" in caplog.text


# ---- together with training


@pytest.mark.slow
def test_corrections_add_up_to_those_that_the_run_was_trained_with(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 6)
    vectors = random.normal(size=(6, 8))[labels] + 0.1 * random.normal(size=(36, 8))
    np.savez(tmp_path / "x.npz", vectors=vectors.astype(np.float32), labels=labels)
    trained = Correction(f"{tmp_path / 'x.npz'}#0", "0", "1")
    (tmp_path / "first.csv").write_text("item,label,corrected\n" + ",".join(map(str, trained)))
    run, again = tmp_path / "run", tmp_path / "again"
    settings = {"test_fraction": 0.0, "epochs": 0}
    nofuss.train(tmp_path / "x.npz", corrections=tmp_path / "first.csv", out=run, **settings)
    with serving(run) as server:
        some = search(server, f"item={server.item(3)}&k=35")["results"]
        (first,) = (item for item in some if item["name"].endswith("#0"))
        (other,) = (item for item in some if item["name"].endswith("#7"))
        assert first["label"] == "1", "as corrected"

        def judge(item: dict[str, Any], label: str | None) -> list[Correction]:
            assert tell(server, "/api/labels", {"item": item["item"], "label": label}).status == 200
            return read_corrections(run / FILE)

        names = [said.item for said in judge(other, "4")]
        assert [Path(name).name for name in names] == ["x.npz#0", "x.npz#7"]
        said = judge(first, "2")[0]
        assert (said.label, said.corrected) == ("0", "2"), "the data have the label from before"
        assert search(server, f"item={first['item']}")["query"]["label"] == "2"
        assert judge(first, None)[0] == trained
        assert search(server, f"item={first['item']}")["query"]["label"] == "1"
    nofuss.train(tmp_path / "x.npz", corrections=run / FILE, out=again, **settings)
    index = Index.load(again / "index")
    assert [index.labels[row] for row in (0, 1, 7)] == ["1", "0", "4"]
