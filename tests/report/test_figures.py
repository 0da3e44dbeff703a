"""Drawings: every curve named once, in the page's colours, names never markup, nothing leaks."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import matplotlib
import numpy as np
import pytest
from markupsafe import Markup

from nofuss.report.figures import VARIABLES, line_chart, map_panel, score_chart, size_chart

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>alert(1)</script>",
    "$x^2$ & </text>",
    "#000001",
    "\x1b[31m\n\udc80",
    "日本 ★",
    "",
]


def curves(count: int) -> list[tuple[str, list[tuple[float, float, float | None, float | None]]]]:
    """Lines that end almost together."""
    return [
        (f"line {i}", [(x, 0.5 + 0.001 * i, None, None) for x in (1.0, 10.0, 100.0)])
        for i in range(count)
    ]


def texts(drawing: str) -> list[Element]:
    return list(fromstring(drawing).iter(f"{SVG}text"))


def a_map(names: list[str], title: str = "Map") -> Markup:
    labels = np.repeat(np.arange(len(names)), 5)
    places = np.random.default_rng(0).random((len(labels), 2)).astype(np.float32)
    stars, of = places[::5], np.arange(len(names))
    return map_panel(
        places, labels % 2 == 0, labels, names, title=title, stars=stars, star_labels=of
    )


DRAWINGS: dict[str, Callable[[str], Markup]] = {
    "scores": lambda name: score_chart([(name, 0.9, (0.8, 0.95)), ("other", 0.5, None)], name),
    "lines": lambda name: line_chart(
        [(name, [(1, 0.5, 0.4, 0.6), (2, 0.6, None, None)])],
        title=name,
        x_label=name,
        levels=[(name, 0.3)],
    ),
    "sizes": lambda name: size_chart(np.array([1, 1, 2, 5, 40])),
    "map": lambda name: a_map([name, name, "other"], name),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", DRAWINGS)
def test_names_are_text(kind: str, name: str) -> None:
    drawing = DRAWINGS[kind](name)
    assert isinstance(drawing, Markup)
    root = fromstring(drawing)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "g", "defs", "path", "use", "text", "clipPath", "rect"}
    shown = "".join(text.text or "" for text in root.iter(f"{SVG}text"))
    if kind != "sizes" and name.isprintable():
        assert name[:15] in shown


@pytest.mark.parametrize("kind", DRAWINGS)
def test_colours_are_variables_of_the_page(kind: str) -> None:
    drawing = DRAWINGS[kind]("name")
    assert re.findall(r"#[0-9a-f]{6}\b(?!\")", drawing) == []
    used = set(re.findall(r"var\(--(\w+)\)", drawing))
    assert {"soft", "c0"} & used
    assert used <= set(VARIABLES)
    assert "font-family" not in drawing
    assert "<style" not in drawing


@pytest.mark.parametrize("kind", DRAWINGS)
def test_a_drawing_is_labelled_and_the_same_every_time(kind: str) -> None:
    drawing = DRAWINGS[kind]('a "label"')
    assert re.match(r'<svg role="img" aria-label="(a &#34;label&#34;|Class sizes)" ', drawing)
    assert drawing == DRAWINGS[kind]('a "label"')


def test_two_drawings_share_no_id() -> None:
    drawings = [DRAWINGS[kind](name) for kind in DRAWINGS for name in "ab"]
    ids = [set(re.findall(r'\bid="([^"]+)"', drawing)) for drawing in drawings]
    for one, drawing in zip(ids, drawings, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', drawing)) == one
    different = {frozenset(one) for one in ids}  # the two of class sizes are equal
    assert sum(map(len, different)) == len(set().union(*different))


def test_labels_of_lines_that_end_together_do_not_touch() -> None:
    drawing = line_chart(curves(6), title="t", x_label="x", levels=[("level", 0.5)])
    names = [t for t in texts(drawing) if (t.text or "").startswith(("line", "level"))]
    assert len(names) == 7
    heights = sorted(float(t.get("y", 0)) for t in names)
    assert all(b - a >= 9 for a, b in pairwise(heights))  # the size of the type
    assert heights[0] > 0
    assert heights[-1] < 2.9 * 72


def test_lines_differ_without_colour() -> None:
    drawing = line_chart(curves(6), title="t", x_label="x")
    styles = re.findall(r"fill: none;([^\"]*); stroke: var\(--c\d\); stroke-width: 1.5", drawing)
    assert len(styles) == 6 - 1  # the first is solid
    assert len(set(styles)) == 5


def test_a_method_keeps_its_style() -> None:
    drawing = line_chart(curves(2), title="t", x_label="x", styles=[4, 2])
    (first,) = (t for t in texts(drawing) if t.text == "line 0")
    assert "var(--c4)" in (first.get("style") or "")


def test_log_axis_spaces_ratios_evenly() -> None:
    drawing = line_chart(curves(1), title="t", x_label="x", log=True)
    x = [float(t.get("x", 0)) for t in texts(drawing) if t.text in ("1", "10", "100")]
    assert len(x) == 3
    assert abs((x[1] - x[0]) - (x[2] - x[1])) < 0.2


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("y", [0.0, 0.5])
def test_a_single_x_has_one_tick(y: float, log: bool) -> None:
    lines = [("a", [(3.0, y, None, None)]), ("b", [(3.0, y, y - 0.1, y + 0.1)])]
    drawing = line_chart(lines, title="t", x_label="epoch", log=log)
    assert [t.text for t in texts(drawing)].count("3") == 1


@pytest.mark.parametrize("sizes", [[20] * 20, [1], [1, 2], [3, 700]])
def test_class_sizes_have_whole_numbers(sizes: list[int]) -> None:
    shown = [t.text or "" for t in texts(size_chart(np.array(sizes)))]
    numbers = [text for text in shown if text[0].isdigit()]
    assert numbers
    assert all(number.isdigit() for number in numbers)


def test_settings_of_a_session_are_neither_used_nor_changed() -> None:
    plain = DRAWINGS["lines"]("name")
    with matplotlib.rc_context({"font.size": 31, "lines.linewidth": 9, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert DRAWINGS["lines"]("name") == plain
        assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_matplotlib_is_imported_with_the_first_drawing_and_pyplot_never() -> None:
    script = """
import sys
from nofuss.report import figures
assert "matplotlib" not in sys.modules
figures.score_chart([("a", 0.5, None)], "Recall@1")
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_no_news(tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", vectors=np.eye(8).repeat(4, 0), labels=np.arange(32) // 4)
    words = ["train", "v.npz", "--out", "run", "--epochs", "1"]
    nowhere = {"HOME": "/proc/nowhere", "MPLCONFIGDIR": "/proc/nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "nofuss", *words],
        cwd=tmp_path,
        env={**os.environ, **nowhere, "NOFUSS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "atplotlib" not in done.stdout + done.stderr
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
