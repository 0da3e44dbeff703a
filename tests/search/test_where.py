"""The filter of a search: by hand, against SQL's three values by a slow loop, and rubbish."""

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nofuss import Index
from nofuss.data.columns import Column, Type, clean
from nofuss.search.where import (
    DEEPEST,
    Compare,
    Condition,
    Every,
    FilterError,
    Null,
    Some,
    parse_filter,
)

TYPES: dict[str, Type] = {
    "label": "text",
    "price": "number",
    "shop": "text",
    "since": "date",
    "sale": "bool",
    "unit price": "number",
}
PRICES = [1.0, 19.99, 20.0, None, 25.5, -3.0]
SHOPS = ["north", None, "south", "north", "it's", "sØuth"]
SALES = [True, False, None, True, False, None]
DATES = ["2024-05-01T00:00:00", "2024-05-01T12:30:00", None, "2023-12-31T00:00:00"]
DATES += ["2025-01-01T00:00:00", "2024-05-02T00:00:00"]
LABELS = ["a", "b", None, "a", "b", "c"]
COLUMNS = {
    "price": Column("number", PRICES),
    "shop": Column("text", SHOPS),
    "since": Column("date", DATES),
    "sale": Column("bool", SALES),
}


def index() -> Index:
    return Index.build(np.eye(6), names=[str(i) for i in range(6)], labels=LABELS, columns=COLUMNS)


def passing(text: str) -> list[int]:
    _, rows = index().search(np.ones((1, 6)), 6, where=text)
    return sorted(rows[0].tolist())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price<20", [0, 1, 5]),
        ("price<20 and shop=='north'", [0]),
        ("20 > price", [0, 1, 5]),
        ("PRICE <= 2e1 AND price >= -3", [0, 1, 2, 5]),
        ("price = 20 or price <> 20", [0, 1, 2, 4, 5]),
        ("not price<20", [2, 4]),  # no price is not a high one
        ("price is null", [3]),
        ("price == null or sale != null", [0, 1, 3, 4]),
        ("not (price is null or sale is null)", [0, 1, 4]),
        ("shop in ('north', 'it''s')", [0, 3, 4]),
        ('shop not in ("north")', [2, 4, 5]),
        ("not shop in ('north')", [2, 4, 5]),
        ("shop > 'north'", [2, 5]),
        ("sale", [0, 3]),
        ("not sale", [1, 4]),
        ("sale == false and label != 'b'", []),
        ("since >= '2024-05-01' and since < '2024-05-02'", [0, 1]),
        ("since == '2024-05-01 12:30'", [1]),
        ("label == 'a' or label is null", [0, 2, 3]),
        ("`price` > 25 or (price < 0 and not not shop != 'x')", [4, 5]),
        ("price < 1 or price < 20 and price > 10", [1, 5]),  # and binds first
    ],
)
def test_by_hand(text: str, expected: list[int]) -> None:
    assert passing(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a column at character 1, got the end"),
        ("price<", r"expected a value .* at character 7, got the end"),
        ("price<20 and", "expected a column at character 13, got the end"),
        ("price<20 shop=='x'", "expected and, or, or the end at character 10, got shop"),
        ("prize<20", r"no column prize at character 1; there are label \(text\), price \(number\)"),
        ("price<'20'", "price is compared with a number; got '20' at character 7"),
        ("shop==20", "shop is compared with text in quotes; got 20 at character 7"),
        ("shop==north", "expected a value .* at character 7, got north"),
        ("since>'May 1st'", "since is compared with a date .* at character 7"),
        ("since>'2024-02-30'", "since is compared with a date"),
        ("sale<true", "sale is compared by == or != with true or false"),
        ("price<null", "null at character 7 can't be ordered"),
        ("price", "expected a comparison of price, such as == or <, at character 6"),
        ("shop=='north", "can't read an unclosed ' at character 7"),
        ("price<20; drop table x", "can't read ';' at character 9"),
        ("__import__('os')", "no column __import__ at character 1"),
        ("price.real<1", r"can't read '\.' at character 6"),
        ("price<1e999", "price is compared with a number; got 1e999"),
        ("price<20)", r"expected and, or, or the end at character 9, got \)"),
        ("(price<20", r"expected \) at character 10, got the end"),
        ("price in ()", "expected a value"),
        ("price in (1,)", "expected a value"),
        ("(" * 99 + "price<1", f"more than {DEEPEST} levels at character"),
        ("not " * 99 + "sale", f"more than {DEEPEST} levels at character"),
        ("x" * 4001, "the filter has 4,001 characters; at most 4,000"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(FilterError, match=complaint) as caught:
        parse_filter(text, TYPES)
    assert "\n" not in str(caught.value)


def test_a_column_of_any_name_can_be_asked_for() -> None:
    types: dict[str, Type] = {"unit price": "number", "a`b": "text", "and": "bool", "größe": "text"}
    text = "`unit price`<3 and `a``b`=='x' and `and` and größe=='XL'"
    expected = (
        Compare("unit price", "<", 3.0),
        Compare("a`b", "==", "x"),
        Compare("and", "==", True),
        Compare("größe", "==", "XL"),
    )
    assert parse_filter(text, types) == Every(expected)


def test_columns_follow_their_items() -> None:
    """Removed, added, saved and loaded, in an index of another kind."""
    changed = index()
    changed.remove(["0", "1"])
    changed.add(np.ones((1, 6)), names=["new"], columns={"price": [7]})
    assert [changed.items([row])[0].cells for row in (0, 4)] == [
        {"price": 20.0, "shop": "south"},
        {"price": 7.0},
    ]
    _, rows = changed.search(np.ones((1, 6)), 6, where="price<8 and shop is null")
    assert [changed.names[row] for row in rows[0]] == ["new"]
    with pytest.raises(ValueError, match="column price is text here, but number in the index"):
        changed.add(np.ones((1, 6)), names=["x"], columns={"price": ["7"]})
    with pytest.raises(ValueError, match="got a mixture"):
        changed.add(np.ones((1, 6)), names=["x"], columns={"price": ["7", 7]})
    with pytest.raises(ValueError, match="2 values of price for 1 items"):
        changed.add(np.ones((1, 6)), names=["x"], columns={"price": [7, 8]})
    assert len(changed) == 5


def test_an_approximate_index_filters_as_the_exact_one() -> None:
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    vectors = random.normal(size=(4_000, 16))
    columns = {"price": Column("number", random.integers(0, 100, 4_000).astype(float).tolist())}
    exact = Index.build(vectors, names=[str(i) for i in range(4_000)], columns=columns)
    approximate = exact.as_kind("approximate")
    for where in ("price<3", "price<30", "price<90"):
        _, expected = exact.search(vectors[:50], 10, where=where)
        _, found = approximate.search(vectors[:50], 10, where=where)
        values = np.array(columns["price"].values)[found.numpy()]
        assert (values < float(where[6:])).all()
        assert (found[:, :, None] == expected[:, None]).any(1).double().mean() > 0.7


# Fuzzing

texts = st.sampled_from(
    ["north", "it's", 'say "so"', "back\\slash", "", "ü★😀", "%s %(x)s {}", "a;--"]
)
values: dict[Type, st.SearchStrategy[Any]] = {
    "number": st.sampled_from([0.0, -3.0, 19.99, 20.0, 1e300, -1e-7, 25.5]),
    "text": texts,
    "date": st.sampled_from(DATES).filter(bool),
    "bool": st.booleans(),
}


@st.composite
def conditions(draw: Callable[..., Any], depth: int = 3) -> Condition:
    """A random condition over the columns, and nothing a parser had a hand in."""
    kind = draw(st.sampled_from(["compare", "null", "every", "some"] if depth else ["compare"]))
    if kind in ("every", "some"):
        parts = draw(st.lists(conditions(depth - 1), min_size=2, max_size=3))
        return Every(tuple(parts)) if kind == "every" else Some(tuple(parts))
    column = draw(st.sampled_from(["label", "price", "shop", "since", "sale"]))
    if kind == "null":
        return Null(column, draw(st.booleans()))
    signs = ["==", "!="] if column == "sale" else ["==", "!=", "<", "<=", ">", ">="]
    return Compare(column, draw(st.sampled_from(signs)), draw(values[TYPES[column]]))


def spelled(condition: Condition) -> str:
    """The filter that a person would write for it."""
    if isinstance(condition, Every | Some):
        word = " and " if isinstance(condition, Every) else " or "
        return "(" + word.join(spelled(part) for part in condition.parts) + ")"
    if isinstance(condition, Null):
        return f"{condition.column} is {'' if condition.missing else 'not '}null"
    value = condition.value
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if isinstance(value, str):
        shown = "'" + value.replace("'", "''") + "'"
    return f"{condition.column} {condition.operator} {shown}"


def holds(condition: Condition, cells: dict[str, Any]) -> bool | None:
    """SQL's three values, by the book: None is unknown."""
    if isinstance(condition, Null):
        return (cells[condition.column] is None) == condition.missing
    if isinstance(condition, Compare):
        names = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
        value = cells[condition.column]
        if value is None:
            return None
        return bool(getattr(operator, names[condition.operator])(value, condition.value))
    found = [holds(part, cells) for part in condition.parts]
    if isinstance(condition, Every):
        return False if False in found else None if None in found else True
    return True if True in found else None if None in found else False


@pytest.mark.fuzz
@settings(deadline=None)
@given(condition=conditions(), negations=st.integers(0, 3))
def test_a_filter_means_what_sql_says(condition: Condition, negations: int) -> None:
    whole = index()
    text = "not " * negations + spelled(condition)
    parsed = parse_filter(text, whole.types)
    mask = whole.table.matching(parsed, whole.labels)
    for row in range(6):
        cells = {name: column.values[row] for name, column in COLUMNS.items()}
        truth = holds(condition, cells | {"label": LABELS[row]})
        expected = truth if truth is None or negations % 2 == 0 else not truth
        assert bool(mask[row]) == (expected is True), (text, cells)


words = st.sampled_from(
    ["and", "or", "not", "in", "is", "null", "true", "(", ")", ",", "==", "<", "<>", "'", '"', "`"]
)
others = st.sampled_from(
    ["20", "-1e5", "'x'", "\\", "\0", "\n", "٣", "__class__", "%s", ";", *TYPES]
)


@pytest.mark.fuzz
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=60) | st.lists(words | others, max_size=25).map(" ".join))
def test_any_text_is_a_filter_or_an_error_of_ours(text: str) -> None:
    whole = index()
    with suppress(FilterError):
        whole.table.matching(parse_filter(text, whole.types), LABELS)


def test_clean_text_is_what_databases_hold() -> None:
    assert clean("a\0b\udcff\n★") == "a\\x00b\\udcff\\n★"
