"""Templates: hostile names stay text wherever a page shows them; a missing value is an error."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

import nofuss
from nofuss.data.collection import Collection
from nofuss.paper.page import results_page as render_results
from nofuss.report import render, write_report
from tests.shown import nothing_to_show

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover=alert(1) x='",
    "</style></title></svg></code><script>",
    "&lt;b&gt; {{ 7 * 7 }} {% raw %}",
    "two\nlines\tand\x01\x1b[31m\x7f",
    "file \udc80 name",
]


class Page(HTMLParser):
    """Names of tags and attributes, and the text with the attributes' values."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page.decode("utf-8"))

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(name)
        self.attributes |= {key for key, _ in attributes}
        self.words += [value or "" for _, value in attributes]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def assert_is_text(page: bytes, name: str) -> None:
    """The name is shown, and no tag or attribute came of it."""
    parsed = Page(page)
    shown = name.replace("\udc80", "\ufffd")  # what a browser makes of a lone surrogate
    assert any(shown in words for words in parsed.words)
    assert "script" not in parsed.tags
    assert not {key for key in parsed.attributes if key.startswith("on")}
    assert "x" not in parsed.words  # as the source of a picture


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
        notes=(name,),
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
    page = render_results([entry(name)], lambda _: grid)
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
