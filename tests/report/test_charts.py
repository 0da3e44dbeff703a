"""Line charts: every line named once, names apart from each other, names never markup."""

import itertools
from xml.etree.ElementTree import Element, fromstring

import pytest

from nofuss.report.charts import DASHES, LABEL, line_chart
from nofuss.report.figures import percent_labels, ticks


def chart(count: int, **more: object) -> Element:
    lines = [
        (f"line {i}", [(x, 0.5 + 0.001 * i, None, None) for x in (1.0, 10.0, 100.0)])
        for i in range(count)
    ]
    return fromstring(line_chart(lines, title="t", x_label="x", **more))  # type: ignore[arg-type]


def test_labels_of_lines_that_end_together_do_not_touch() -> None:
    names = [t for t in chart(6, levels=[("level", 0.5)]).iter("text") if t.get("class") == "name"]
    assert len(names) == 7
    heights = sorted(float(t.get("y", 0)) for t in names)
    assert all(b - a >= LABEL - 0.01 for a, b in itertools.pairwise(heights))
    assert heights[0] > 0
    assert heights[-1] < 320


def test_lines_differ_without_colour() -> None:
    drawn = [line.get("stroke-dasharray") for line in chart(6).iter("polyline")]
    assert drawn == list(DASHES)
    assert len(set(drawn)) == 6


def test_log_axis_spaces_ratios_evenly() -> None:
    points = next(chart(1, log=True).iter("polyline")).get("points", "").split()
    x = [float(p.split(",")[0]) for p in points]
    assert abs((x[1] - x[0]) - (x[2] - x[1])) < 0.2


def test_names_are_text() -> None:
    lines = [("<script>x</script>", [(0.0, 1.0, 0.9, 1.1), (1.0, 2.0, None, None)])]
    page = line_chart(lines, title="<b>", x_label="x", percent=False)
    assert "<script" not in page
    assert "<b>" not in page


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("y", [0.0, 0.5])
def test_a_single_x_lies_in_the_middle(y: float, log: bool) -> None:
    lines = [("a", [(3.0, y, None, None)]), ("b", [(3.0, y, y - 0.1, y + 0.1)])]
    drawn = fromstring(line_chart(lines, title="t", x_label="epoch", log=log))
    places = {line.get("points", "").split(",")[0] for line in drawn.iter("polyline")}
    assert len(places) == 1
    assert 50 < float(places.pop()) < 560
    assert [t.text for t in drawn.iter("text")].count("3") == 1  # the tick


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.275, 0.38, ["27.5%", "30.0%", "32.5%", "35.0%", "37.5%"]),
        (0.5, 0.51, ["50.0%", "50.2%", "50.4%", "50.6%", "50.8%", "51.0%"]),
        (0.1, 0.1125, ["10.00%", "10.25%", "10.50%", "10.75%", "11.00%", "11.25%"]),
    ],
)
def test_labels_of_ticks_are_not_rounded(low: float, high: float, labels: list[str]) -> None:
    assert percent_labels(ticks(low, high, 5)) == labels


def test_a_label_that_is_no_round_number_has_one_decimal() -> None:
    assert percent_labels([2 / 3]) == ["66.7%"]
