"""The filter of a search: by hand, against SQL's three values by a slow loop, and rubbish."""

import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nofuss import Index
from nofuss.data.columns import Column, Type, clean
from nofuss.search.filter import (
    LABEL,
    LONGEST,
    Coded,
    Compare,
    Condition,
    FilterError,
    Join,
    as_mask,
    as_milvus,
    as_sql,
    encode,
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
    [hits] = index().search(np.ones((1, 6)), 6, where=text)
    return sorted(map(int, hits.names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price<20", [0, 1, 5]),
        ("price<20 and shop=='north'", [0]),
        ("20 > price", [0, 1, 5]),
        ("PRICE <= 2e1 AND price >= -3", [0, 1, 2, 5]),
        ("price == 20 or price != 20", [0, 1, 2, 4, 5]),
        ("1 < price <= 20.", [1, 2]),
        ("not 1 < price <= 20", [0, 4, 5]),
        ("not price<20", [2, 4]),  # no price is not a high one
        ("price is None", [3]),
        ("PRICE IS NOT NULL AND TRUE == sale", [0]),
        ("price == null or sale != null", [0, 1, 3, 4]),
        ("not (price is null or sale is null)", [0, 1, 4]),
        (r"shop in ('north', 'it\'s')", [0, 3, 4]),
        ('shop in ["north", "it\'s"]', [0, 3, 4]),
        ("sale in (true)", [0, 3]),
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
        ("", "expected a value or a comparison at character 1, got the end"),
        ("price<", "expected a value or a comparison at character 7, got the end"),
        ("price<20 and", "expected a value or a comparison at character 13, got the end"),
        ("price<20 shop=='x'", "can't read shop=='x' at character 10; join comparisons by and"),
        ("prize<20", r"no column prize at character 1; there are label \(text\), price \(number\)"),
        ("price<'20'", "price is compared with a number; got '20' at character 7"),
        ("`unit price`<'★'", "unit price is compared with a number; got '★' at character 14"),
        ("shop==20", "shop is compared with text in quotes; got 20 at character 7"),
        ("shop==north", "shop is compared with text in quotes; got north at character 7"),
        ("price==shop", "price is compared with a number; got shop at character 8"),
        ("since>'May 1st'", "since is compared with a date .* at character 7"),
        ("since>'2024-02-30'", "since is compared with a date"),
        ("sale<true", "sale is compared by == or != with True or False; got true at character 6"),
        ("price<null", "price is compared with a number; got null at character 7"),
        ("price is 20", "write == for is, unless with None: 20 at character 10"),
        ("price", "expected a comparison, such as == or <, got price at character 1"),
        ("1 == 1", "expected a column, got 1 at character 6"),
        ("price = 20", "write == for = at character 7"),
        ("price <> 20", "write != for <> at character 7"),
        ("shop=='it''s'", r"write \\' for a quote in quotes at character 11"),
        ("shop==b'north'", "expected a space at character 8, got 'north'"),
        ("shop=='north", "can't read an unclosed ' at character 7"),
        ("price<20; drop table x", "can't read ';' at character 9"),
        ("__import__('os')", r"expected a comparison, .* got __import__\('os'\) at character 1"),
        ("price[0]<1", r"expected a column, got price\[0\] at character 1"),
        ("price.real<1", r"can't read '\.' at character 6"),
        ("price<1e999", "price is compared with a number; got 1e999"),
        ("price<1_000", "can't read '1' at character 7"),
        ("price<20)", r"unmatched '\)' at character 9"),
        ("(price<20", r"'\(' was never closed at character 1"),
        ("price in ()", r"expected a list such as \('a', 'b'\), got \(\) at character 10"),
        ("price in (1, null)", "price is compared with a number; got null at character 14"),
        ("(" * 300 + "price<1", "too many nested parentheses at character 201"),
        ("x" * (LONGEST + 1), "the filter has 2,001 characters; at most 2,000"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(FilterError, match=complaint) as caught:
        parse_filter(text, TYPES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "not " * 499 + "sale",
        "not (" * 199 + "sale" + ")" * 199,
        "(" * 999 + "sale" + ")" * 999,
        "price in [" * 200,
        "sale or (" * 180 + "sale" + ")" * 180,
        "price < " * 249 + "price",
    ],
    ids=lambda text: text[:9],
)
def test_deep_nesting_ends_in_a_condition_or_an_error(text: str) -> None:
    """In a thread with as little stack as macOS gives to one."""
    outcomes = list[object]()

    def work() -> None:
        try:
            outcomes.append(as_milvus(parse_filter(text, TYPES)))
        except FilterError as error:
            outcomes.append(error)

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert len(outcomes) == 1


def test_a_column_of_any_name_can_be_asked_for() -> None:
    """Also where the name means something to Python, or Python would spell it another way."""
    types: dict[str, Type] = {"unit price": "number", "a`b": "text", "and": "bool", "größe": "text"}
    types |= {"class": "text", "ﬁ": "text", "一": "number"}
    text = "`unit price`<3 and `a``b`=='x' and `and` and größe=='XL' and class!='ﬁ' and ﬁ=='class'"
    expected = (
        Compare("unit price", "<", 3.0),
        Compare("a`b", "==", "x"),
        Compare("and", "==", True),
        Compare("größe", "==", "XL"),
        Compare("class", "!=", "ﬁ"),
        Compare("ﬁ", "==", "class"),
        Compare("一", ">", 0.0),
    )
    assert parse_filter(f"{text} and 一 > 0", types) == Join(True, expected)


def test_databases_get_names_and_values_as_parameters_or_in_quotes() -> None:
    types: dict[str, Type] = {LABEL: "text", '%s"]': "text", "price": "number"}
    asked = parse_filter("`%s\"]` in ('a\"', '%s') and label is None and not price < 3", types)
    sql, values = as_sql(asked, types)
    assert values == ['%s"]', '%s"]', ['a"', "%s"], "price", "price", 3.0]
    assert sql.count("%s") == len(values)
    assert sql.endswith("END) >= %s)")
    assert as_milvus(asked) == (
        r'(((exists columns["%s\"]"]) and '
        r'(columns["%s\"]"] == "a\"" or columns["%s\"]"] == "%s")) and '
        r'(not (label != "")) and ((exists columns["price"]) and columns["price"] >= 3.0))'
    )


def test_many_classes_are_filtered_in_one_pass() -> None:
    labels = [str(i // 4) for i in range(8000)]
    asked = list[str]()

    def column(name: str) -> Coded:
        asked.append(name)
        return encode(labels)

    assert as_mask(Compare(LABEL, "in", tuple(map(str, range(2000)))), column).all()
    assert asked == [LABEL]


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
    if depth and draw(st.booleans()):
        parts = draw(st.lists(conditions(depth - 1), min_size=2, max_size=3))
        return Join(draw(st.booleans()), tuple(parts))
    column = draw(st.sampled_from(["label", "price", "shop", "since", "sale"]))
    signs = ["==", "!=", "in", "not in", "missing", *(["<", "<=", ">", ">="] * (column != "sale"))]
    sign, value = draw(st.sampled_from(signs)), values[TYPES[column]]
    if "in" in sign.split():
        return Compare(column, sign, tuple(draw(st.lists(value, min_size=1, max_size=3))))
    return Compare(column, sign, draw(st.booleans() if sign == "missing" else value))


def spelled(condition: Condition) -> str:
    """The filter that a person would write for it."""
    if isinstance(condition, Join):
        word = " and " if condition.every else " or "
        return "(" + word.join(spelled(part) for part in condition.parts) + ")"
    column, sign, value = condition
    if sign == "missing":
        return f"{column} is {'' if value else 'not '}None"
    return f"{column} {sign} {literal(value)}"


def literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)


def holds(condition: Condition, cells: dict[str, Any]) -> bool | None:
    """SQL's three values, by the book: None is unknown."""
    if isinstance(condition, Compare):
        value = cells[condition.column]
        if condition.operator == "missing":
            return (value is None) == condition.value
        if value is None:
            return None
        if condition.operator in ("in", "not in"):
            return (value in condition.value) == (condition.operator == "in")
        names = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
        return bool(getattr(operator, names[condition.operator])(value, condition.value))
    found = [holds(part, cells) for part in condition.parts]
    if condition.every:
        return False if False in found else None if None in found else True
    return True if True in found else None if None in found else False


@pytest.mark.fuzz
@settings(deadline=None)
@given(condition=conditions(), negations=st.integers(0, 3))
def test_a_filter_means_what_sql_says(condition: Condition, negations: int) -> None:
    text = "not " * negations + spelled(condition)
    columns = {name: column.values for name, column in COLUMNS.items()} | {LABEL: LABELS}
    mask = as_mask(parse_filter(text, TYPES), lambda name: encode(columns[name]))
    for row in range(6):
        cells = {name: column.values[row] for name, column in COLUMNS.items()}
        truth = holds(condition, cells | {"label": LABELS[row]})
        expected = truth if truth is None or negations % 2 == 0 else not truth
        assert bool(mask[row]) == (expected is True), (text, cells)


words = st.sampled_from(
    ["and", "or", "not", "in", "is", "null", "True", *"()[],'\"`=", "==", "<", "<>", "None"]
)
others = st.sampled_from(
    ["20", "-1e5", "'x'", "\\", "\0", "\n", "٣", "__class__", "%s", ";", "lambda", *TYPES]
)


@pytest.mark.fuzz
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=60) | st.lists(words | others, max_size=25).map(" ".join))
def test_any_text_is_a_filter_or_an_error_of_ours(text: str) -> None:
    with suppress(FilterError):
        condition = parse_filter(text, TYPES)
        as_mask(condition, lambda name: encode([None, None]))
        as_milvus(condition)
        sql, parameters = as_sql(condition, TYPES)
        assert sql.count("%s") == len(parameters)


def test_clean_text_is_what_databases_hold() -> None:
    assert clean("a\0b\udcff\n★") == "a\\x00b\\udcff\\n★"


def test_a_text_may_begin_a_filter() -> None:
    """Also where the filter ends in a quote."""
    condition = parse_filter("'north' == shop or shop == 'south'", {"shop": "text"})
    assert condition == parse_filter("shop == 'north' or shop == 'south'", {"shop": "text"})
