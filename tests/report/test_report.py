"""report.html: it stands alone, says what the run's files say, and takes names for text."""

import csv
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

import nofuss
from nofuss.commands import evaluate
from nofuss.commands.doctor import diagnose
from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.files import read_json, write_json
from nofuss.paper.page import results_page
from nofuss.report import render, write_report
from nofuss.run.proxies import RunEmbeddings, RunProxies
from tests.browser import complaints, open_browser
from tests.tiny_run import scene

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover=alert(1) x='",
    "</style></title></svg></code><script>",
    "&lt;b&gt; {{ 7 * 7 }} {% raw %}",
    "two\nlines\tand\x01\x1b[31m\x7f",
    "file \udc80 name",
]


def nothing_to_show(dim: int) -> RunEmbeddings:
    """Neither items nor proxies."""
    vectors, rows = np.empty((0, dim), np.float32), np.empty(0, np.int64)
    return RunEmbeddings(vectors, rows, vectors, RunProxies.none(dim))


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: Path | bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed((page if isinstance(page, bytes) else page.read_bytes()).decode())

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == name]


@pytest.fixture(scope="module")
def page(picture_run: Path) -> Page:
    return Page(picture_run / "report.html")


def test_it_asks_for_nothing_else(page: Page) -> None:
    assert page.named("script") == page.named("link") == page.named("iframe") == []
    for image in page.named("img"):
        assert (image["src"] or "").startswith("data:image/")
    for link in page.named("a"):
        assert (link["href"] or "").startswith("#") or link["href"] == "suspects.csv"
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "url(" not in (attributes.get("style") or "")


def assert_is_text(page: bytes, name: str) -> None:
    """The name is shown, and no tag or attribute came of it."""
    parsed, shown = Page(page), name.replace("\udc80", "\ufffd")  # as browsers show a surrogate
    attributes = [(key, value or "") for _, found in parsed.tags for key, value in found.items()]
    assert any(shown in words for words in [*parsed.words, *(value for _, value in attributes)])
    assert not parsed.named("script")
    assert not [key for key, _ in attributes if key.startswith("on")]
    assert ("src", "x") not in attributes


@pytest.mark.parametrize("name", HOSTILE)
def test_a_run_full_of_hostile_names(name: str, tmp_path: Path) -> None:
    labels = np.repeat([0, 1], 4)
    kept = nothing_to_show(2)
    vectors = np.eye(2, dtype=np.float32)[[0, 0, 0, 1, 1, 1, 1, 0]]  # two lie in the other class
    kept = type(kept)(**{**vars(kept), "test": vectors, "test_rows": np.arange(8)})
    collection = Collection(
        name="hostile",
        layout="arrays",
        array=np.full((8, 4, 4, 3), 200, np.uint8),
        labels=labels,
        class_names=(name, f"other {name}"),
        remarks=(name,),
    )
    page = write_report(tmp_path, collection, kept).read_bytes()
    assert_is_text(page, name)
    assert b"<img" in page
    assert b"<svg" in page


def entry(name: str) -> dict[str, Any]:
    """An entry of results.json with a name in every place of text."""
    point = (1.0, 0.5, None, None)
    return {
        "name": name,
        "data": "cub",
        "budget": "minutes",
        "title": name,
        "claim": name,
        "verdict": name,
        "sentence": name,
        "tables": [{"title": name, "head": ["", name, "last"], "rows": [[name, name]]}],
        "figures": [
            {
                "title": name,
                "x": name,
                "percent": True,
                "log": False,
                "series": [{"name": name, "points": [point]}],
                "levels": [(name, 0.5)],
            }
        ],
        "grid": "key",
        "how": [name],
        "command": name,
        "seeds": [0],
        "machine": {"device": name, "cores": 2, "threads": 1, "versions": {"torch": name}},
        "trained": name,
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reproduction_full_of_hostile_names(name: str) -> None:
    picture = {"src": f"data:{name}", "label": name, "title": name, "pixelated": False}
    lost = {**picture, "src": None}
    hits = [
        {"picture": picture, "distance": 0.5, "right": True},
        {"picture": lost, "distance": 1.0, "right": False},
    ]
    grid: Any = [{"title": name, "rows": [{"query": picture, "hits": hits}]}]
    page = results_page([entry(name)], lambda _: grid)
    assert_is_text(page, name)
    assert page.count(b"<td></td>") == 1  # a row that is shorter than its head
    assert "✓".encode() in page
    assert "✗".encode() in page
    assert b"no picture" in page


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="title"):
        render("report/layout.html")


def test_no_template_switches_escaping_off() -> None:
    folder = Path(nofuss.__file__).parent
    templates = [*folder.glob("report/*.html"), *folder.glob("paper/*.html")]
    assert len(templates) == 4
    for template in templates:
        source = template.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|autoescape", source), template


def test_it_says_what_the_files_say(page: Page, picture_run: Path) -> None:
    scores = json.loads((picture_run / "scores.json").read_text())
    assert f"{100 * scores['recall@1']:.2f}" in page.text
    assert f"{100 * scores['nmi']:.2f}" in page.text
    low, high = scores["recall@1_interval"]
    assert f"{100 * low:.1f} to {100 * high:.1f}" in page.text
    assert json.loads((picture_run / "environment.json").read_text())["command"] in page.text
    for heading in (
        "Training",
        "More neighbours",
        "Suspects in the data",
        "Map",
        "Bounds",
        "Settings",
    ):
        assert heading in page.text
    assert "✓" in page.text
    assert "4√ε" in page.text


def test_it_opens_with_a_sentence_a_picture_and_a_chart(picture_run: Path) -> None:
    """All else folds open."""
    opening, *folded = (picture_run / "report.html").read_text().split("<details>")
    assert re.search(r"Finds the right class first for <b>\d+ of 100</b> pictures", opening)
    first = Page(opening.encode())
    assert len(first.named("svg")) == 1
    assert len(first.named("ol")) == 5
    assert "95%" not in first.text.replace("with 95% intervals", "")
    assert len(folded) > 6


def test_the_duplicates_are_those_of_the_doctor(tmp_path: Path) -> None:
    """Of all items, not only of those that were tested; the ones with different labels first."""
    data = tmp_path / "data"
    for c, name in enumerate(("ant", "bee")):
        (data / name).mkdir(parents=True)
        for i in range(3):
            scene(10 * c + i).save(data / name / f"{i}.png")
    shutil.copy(data / "ant" / "0.png", data / "ant" / "copy.png")
    scene(11).resize((70, 70)).save(data / "ant" / "near.jpg", quality=40)
    collection = open_data(data)
    kept = nothing_to_show(2)
    angle = np.arange(3, dtype=np.float32)
    vectors = np.stack([np.cos(angle), np.sin(angle)], 1)
    kept = replace(kept, test=vectors, test_rows=np.array([0, 1, 5]))
    text = Page(write_report(tmp_path, collection, kept)).text
    with (tmp_path / "suspects.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "duplicate"]
    pairs = [[row["item"], row["other_item"]] for row in rows]
    assert pairs == [["ant/near.jpg", "bee/1.png"], ["ant/0.png", "ant/copy.png"]]
    found = diagnose(collection)
    assert [group.items for group in found.near_duplicates + found.duplicates] == pairs
    assert "Duplicates: 2" in text
    assert "labelled ant, bee" in text


def test_vectors_have_no_grid(vector_run: Path) -> None:
    page = Page(vector_run / "report.html")
    assert page.named("img") == []
    assert "More neighbours" not in page.text
    assert "their PCA" in page.text
    assert "Bounds" in page.text
    assert page.named("svg")


def test_evaluation_renews_it_and_keeps_the_baselines(vector_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(vector_run, run)
    before = json.loads((run / "scores.json").read_text())
    (run / "report.html").unlink()
    evaluate.main(run, k=(1, 2))
    after = json.loads((run / "scores.json").read_text())
    assert after["baselines"] == before["baselines"]
    assert after["recall@1"] == before["recall@1"]
    assert "their PCA" in Page(run / "report.html").text


def test_a_bare_run_has_a_report_too(picture_run: Path, tmp_path: Path) -> None:
    """No scores, no metrics, no embeddings: what there is, is shown."""
    collection = open_data(picture_run.parent / "data")
    file = write_report(tmp_path, collection, nothing_to_show(8))
    page = Page(file)
    assert "no test classes" in page.text
    assert "Data" in page.text


@pytest.mark.parametrize(
    ("recall", "map_r", "verdict"),
    [
        ((0.1, 0.0, 0.2), (0.1, 0.05, 0.2), "paid off"),
        ((-0.1, -0.2, -0.01), (0.0, 0.0, 0.0), "made it worse"),
        ((0.02, 0.0, 0.06), (0.0, 0.0, 0.1), "made little difference"),
        ((0.1, -0.1, 0.2), (0.1, 0.05, 0.2), "made little difference"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), "made no difference"),
    ],
)
def test_it_opens_with_what_learning_was_worth(
    recall: tuple[float, ...],
    map_r: tuple[float, ...],
    verdict: str,
    vector_run: Path,
    tmp_path: Path,
) -> None:
    scores = read_json(vector_run / "scores.json")
    gain = {"over": "untrained features", "recall@1": recall, "map@r": map_r}
    write_json(tmp_path / "scores.json", scores | {"gain": gain})
    collection = open_data(vector_run.parent / "data.npz")
    page = Page(write_report(tmp_path, collection, nothing_to_show(8)))
    assert f"Learning {verdict}: Recall@1" in page.text


def test_a_picture_that_vanished_is_left_out(picture_run: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(picture_run.parent / "data", data)
    collection = open_data(data)
    rows = np.arange(len(collection))
    vectors = np.random.default_rng(0).normal(size=(len(rows), 8)).astype(np.float32)
    for row in rows[:3]:
        collection.paths[row].unlink()
    shown = replace(nothing_to_show(8), test=vectors, test_rows=rows)
    page = Page(write_report(tmp_path, collection, shown))
    assert "no picture" in page.text


def test_it_opens_in_a_browser_without_a_complaint(picture_run: Path, tmp_path: Path) -> None:
    with open_browser(tmp_path / "profile") as browser:
        browser.get((picture_run / "report.html").as_uri())
        assert complaints(browser) == []
        assert browser.title == "run · nofuss"
        assert browser.execute_script("return document.images.length") > 20
        broken = "return [...document.images].filter((i) => !i.naturalWidth).length"
        assert browser.execute_script(broken) == 0
        wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.execute_script(wide)
