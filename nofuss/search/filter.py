"""The filter of a search, `price < 20 and shop == 'north'`: parsed as Python, never evaluated.

Allowed are and, or, not, parentheses, and comparisons of a column (chains too, 10 <= price < 20)
with a number, 'text', True, False or None; `in` with a list; `is None`. A column whose name is not
a word is written in backquotes: `unit price`.

Numbers, texts and names are read here; Python's parser sees as many letters x for each, so that
positions stay right and nothing of a filter can mean anything to Python. Its tree becomes
conditions, which `fold` walks for arrays, SQL and Milvus. An item without a value passes no
comparison, also not a negated one; `not` is moved inwards here, so that all engines agree on this.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from nofuss.data.columns import Type, Value, read_value
from nofuss.errors import visible

LABEL = "label"
"""The name of the label in filters; no column of a table can have it."""
LONGEST = 2000
"""Characters of a filter: Python's parser needs at most 256 KB of stack for them."""
Mask = NDArray[np.bool_]
Result = TypeVar("Result")
_OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NEEDS: dict[Type, str] = {
    "number": "is compared with a number",
    "text": "is compared with text in quotes",
    "date": "is compared with a date in quotes, such as '2024-05-31' or '2024-05-31 18:00'",
    "bool": "is compared by == or != with True or False",
}
_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
      | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign>==|!=|<=|>=|<>|[<>=()\[\],])""",
    re.VERBOSE | re.DOTALL,
)
_JOINS = {"and", "or", "not", "in", "is"}
_INSTEAD = {"=": "==", "<>": "!="}
_VALUES = {"true": True, "false": False, "null": None, "none": None}


class FilterError(ValueError):
    """A filter that can't be read; the message says what and where."""


class Compare(NamedTuple):
    """A column against a value, or `in` against several; "missing" asks whether there is none."""

    column: str
    operator: str
    value: Any


class Join(NamedTuple):
    """All of the conditions, or any of them."""

    every: bool
    parts: tuple["Condition", ...]


Condition = Compare | Join


class _Token(NamedTuple):
    """A number, a text or a name."""

    column: str | None
    """None for a value."""
    value: Value


def parse_filter(text: str, types: Mapping[str, Type]) -> Condition:
    """Return the conditions that a filter spells over columns of these types, or FilterError."""
    if len(text) > LONGEST:
        raise FilterError(f"the filter has {len(text):,} characters; at most {LONGEST:,}")
    text = text.strip()
    letters, tokens = _tokenize(text)
    try:
        tree = ast.parse(letters, mode="eval")
        return _Reader(text, tokens, types).read(tree.body)
    except SyntaxError as error:
        at = error.offset or len(text) + 1
        if at > len(text):
            said = f"expected a value or a comparison at character {at}, got the end"
        elif re.search(r"[][()]|nested", error.msg):
            said = f"{error.msg} at character {at}"
        else:
            got = f"{visible(text[at - 1 :]):.60} at character {at}"
            said = f"can't read {got}; join comparisons by and, or"
        raise FilterError(said) from None
    except (RecursionError, MemoryError):
        raise FilterError("it is nested too deeply; use fewer parentheses") from None


def _tokenize(text: str) -> tuple[str, dict[int, _Token]]:
    """Return the filter with x for each letter of a token, and place → token."""
    letters, tokens, at = "", dict[int, _Token](), 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        kind, token = (found.lastgroup, found[0]) if found else (None, text[at])
        if kind is None:
            what = f"an unclosed {token}" if token in "'\"`" else repr(token)
            raise FilterError(f"can't read {what} at character {at + 1}")
        if token in _INSTEAD:
            raise FilterError(f"write {_INSTEAD[token]} for {token} at character {at + 1}")
        if kind == "space":
            letters += " " * len(token)
        elif kind == "sign" or token.lower() in _JOINS:
            letters += token.lower()
        elif kind == "text" and at and text[at - 1] in "'\"":
            raise FilterError(f"write \\{token[0]} for a quote in quotes at character {at + 1}")
        elif letters[-1:].isalnum():
            raise FilterError(f"expected a space at character {at + 1}, got {visible(token):.60}")
        else:
            tokens[at] = _token(kind, token)
            letters += "x" * len(token)
        at += len(token)
    return letters, tokens


def _token(kind: str, text: str) -> _Token:
    if kind == "number":
        return _Token(None, float(text))
    if kind == "text":
        return _Token(None, re.sub(r"\\([\\'\"])", r"\1", text[1:-1]))
    if kind == "word" and text.lower() in _VALUES:
        return _Token(None, _VALUES[text.lower()])
    return _Token(text[1:-1].replace("``", "`") if kind == "quoted" else text, None)


class _Reader:
    """Turns a few nodes of Python's grammar into conditions; every other node is refused."""

    def __init__(self, text: str, tokens: Mapping[int, _Token], types: Mapping[str, Type]) -> None:
        self.text, self.tokens, self.types = text, tokens, types

    def read(self, node: ast.expr, negated: bool = False) -> Condition:
        match node:
            case ast.BoolOp(op=op, values=values):
                every = isinstance(op, ast.And) != negated
                return _joined([self.read(value, negated) for value in values], every)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.read(inner, not negated)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                pairs = zip([left, *rights], ops, rights, strict=False)
                return _joined([self.compare(*pair, negated) for pair in pairs], not negated)
            case ast.Name() if not self.is_value(node) and self.types[self.column(node)] == "bool":
                return Compare(self.column(node), "==", not negated)
        raise FilterError(f"expected a comparison, such as == or <, got {self.shown(node)}")

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr, negated: bool) -> Condition:
        if isinstance(op, ast.In | ast.NotIn):
            column, is_in = self.column(left), isinstance(op, ast.In) != negated
            listed = right.elts if isinstance(right, ast.List | ast.Tuple) else [right]
            if not listed:
                raise FilterError(f"expected a list such as ('a', 'b'), got {self.shown(right)}")
            values = tuple(self.value(value, column, "in") for value in listed)
            return Compare(column, "in" if is_in else "not in", values)
        sign = _OPERATORS.get(type(op), "==" if isinstance(op, ast.Is) else "!=")
        if self.is_value(left):
            left, right, sign = right, left, _MIRRORED.get(sign, sign)
        column = self.column(left)
        value = self.value(right, column, sign)
        if value is None:
            return Compare(column, "missing", (sign == "==") != negated)
        if isinstance(op, ast.Is | ast.IsNot):
            raise FilterError(f"write {sign} for is, unless with None: {self.shown(right)}")
        return Compare(column, _OPPOSITE[sign] if negated else sign, value)

    def is_value(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and self.tokens[node.col_offset].column is None

    def column(self, node: ast.expr) -> str:
        name = self.tokens[node.col_offset].column if isinstance(node, ast.Name) else None
        if name is None:
            raise FilterError(f"expected a column, got {self.shown(node)}")
        name = name if name in self.types else name.lower()  # as the header of a table is read
        if name not in self.types:
            known = ", ".join(f"{known} ({kind})" for known, kind in self.types.items())
            raise FilterError(f"no column {self.shown(node)}; there are {known}")
        return name

    def value(self, node: ast.expr, column: str, sign: str) -> Value:
        """Return the value that a column is compared with; None, by == and != only, for None."""
        kind = self.types[column]
        found: Value = None
        if isinstance(node, ast.Name) and self.is_value(node):
            value = self.tokens[node.col_offset].value
            if value is None and sign in ("==", "!="):
                return None
            if isinstance(value, bool):
                found = value if kind == "bool" and sign in ("==", "!=", "in") else None
            elif isinstance(value, float):
                found = value if kind == "number" and isfinite(value) else None
            elif isinstance(value, str) and kind in ("text", "date"):
                found = read_value(value, kind)
        if found is None:
            raise FilterError(f"{column} {_NEEDS[kind]}; got {self.shown(node)}")
        return found

    def shown(self, node: ast.expr) -> str:
        """Return what was written for a node, and where."""
        written = self.text[node.col_offset : node.end_col_offset]
        return f"{visible(written):.60} at character {node.col_offset + 1}"


def _joined(parts: list[Condition], every: bool) -> Condition:
    return parts[0] if len(parts) == 1 else Join(every, tuple(parts))


def fold(
    condition: Condition,
    test: Callable[[Compare], Result],
    join: Callable[[bool, list[Result]], Result],
) -> Result:
    """Walk conditions: `test` for each comparison, `join` for all or any of some results."""
    if isinstance(condition, Compare):
        return test(condition)
    return join(condition.every, [fold(part, test, join) for part in condition.parts])


class Coded(NamedTuple):
    """A column as positions in its distinct values: a filter looks at each of them once."""

    codes: NDArray[np.int64]
    """(N,), −1 for None."""
    values: list[Any]


def encode(values: Iterable[Value]) -> Coded:
    """Return the positions of values among the distinct ones."""
    place: dict[Value, int] = {}
    codes = [-1 if value is None else place.setdefault(value, len(place)) for value in values]
    return Coded(np.array(codes, np.int64), list(place))


def as_mask(condition: Condition, column: Callable[[str], Coded]) -> Mask:
    """Return which items pass; `column` gives the values of all items in a column."""
    compare: dict[str, Callable[[Any, Any], bool]] = {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "in": lambda value, listed: value in listed,
        "not in": lambda value, listed: value not in listed,
    }

    def test(asked: Compare) -> Mask:
        codes, values = column(asked.column)
        if asked.operator == "missing":
            return np.asarray((codes < 0) == asked.value)
        wanted = frozenset(asked.value) if "in" in asked.operator else asked.value
        passes = [compare[asked.operator](value, wanted) for value in values]
        return np.array([*passes, False])[codes]  # −1, no value, is the last

    def join(every: bool, masks: list[Mask]) -> Mask:
        return np.asarray(np.all(masks, axis=0) if every else np.any(masks, axis=0))

    return fold(condition, test, join)


def as_sql(condition: Condition, types: Mapping[str, Type]) -> tuple[str, list[Any]]:
    """Return SQL with %s for every name and value, and these."""
    parameters: list[Any] = []
    signs = {"==": "= %s", "!=": "<> %s", "in": "= ANY(%s)", "not in": "<> ALL(%s)"}

    def test(asked: Compare) -> str:
        field = sql_value(asked.column, types[asked.column])
        parameters.extend([asked.column] * field.count("%s"))
        if asked.operator == "missing":
            return f"{field} IS {'' if asked.value else 'NOT '}NULL"
        parameters.append(list(asked.value) if "in" in asked.operator else asked.value)
        return f"{field} {signs.get(asked.operator, f'{asked.operator} %s')}"

    def join(every: bool, parts: list[str]) -> str:
        return f"({(' AND ' if every else ' OR ').join(parts)})"

    return fold(condition, test, join), parameters


def sql_value(column: str, kind: Type) -> str:
    """Return the SQL of a column's value, %s for its name; NULL where there is none of the type.

    Text is ordered by its bytes, whatever the database's language: as in Python and Milvus.
    """
    if column == LABEL:
        return 'label COLLATE "C"'
    in_json = {"number": "number", "bool": "boolean", "text": "string", "date": "string"}[kind]
    rest = {"number": "::float8 END)", "bool": "::boolean END)"}.get(kind, ' END) COLLATE "C"')
    return f"(CASE WHEN jsonb_typeof(columns -> %s) = '{in_json}' THEN (columns ->> %s){rest}"


def as_milvus(condition: Condition) -> str:
    """Return the filter in the language of Milvus, which has no parameters before version 2.5."""

    def test(asked: Compare) -> str:
        field = LABEL if asked.column == LABEL else f"columns[{quoted(asked.column)}]"
        known = '(label != "")' if asked.column == LABEL else f"(exists {field})"
        if asked.operator == "missing":
            return f"(not {known})" if asked.value else known
        tests = f"{field} {asked.operator} {quoted(asked.value)}"
        if asked.column != LABEL and asked.operator in ("in", "not in"):  # not of JSON, in a file
            sign, word = ("==", " or ") if asked.operator == "in" else ("!=", " and ")
            tests = f"({word.join(f'{field} {sign} {quoted(value)}' for value in asked.value)})"
        return f"({known} and {tests})"  # something without a value would match `!=`

    def join(every: bool, parts: list[str]) -> str:
        return f"({(' and ' if every else ' or ').join(parts)})"

    return fold(condition, test, join)


def quoted(value: object) -> str:
    """Return a value as Go reads it: JSON without escaped pairs of surrogates."""
    return json.dumps(value, ensure_ascii=False)
