"""The filter of a search, `price<20 and shop=='north'`: parsed into conditions, never evaluated.

    either     = both ("or" both)*
    both       = one ("and" one)*
    one        = "not" one | "(" either ")" | COLUMN | COLUMN test | VALUE op COLUMN
    test       = op VALUE | ["not"] "in" "(" VALUE ("," VALUE)* ")" | "is" ["not"] "null"
    op         = "==" | "=" | "!=" | "<>" | "<" | "<=" | ">" | ">="
    VALUE      = 20 | -1.5e3 | 'text' | "text" | '2024-05-31' | true | false | null
    COLUMN     = price | `unit price`

A quote within quotes is written twice. An item without a value (None) passes no comparison, also
not a negated one; `is null` finds it. So that all engines agree on this, `not` is moved inwards
while parsing: conditions have no negation that could turn a missing value into a match.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nofuss.data.columns import Type, Value, read_value

Operator = Literal["==", "!=", "<", "<=", ">", ">="]
LONGEST, DEEPEST = 4000, 40
"""Characters of a filter, and parentheses or `not`s within each other."""
_OPPOSITE: dict[Operator, Operator] = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
}
_MIRRORED: dict[Operator, Operator] = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
      | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign>==|=|!=|<>|<=|>=|<|>|\(|\)|,)""",
    re.VERBOSE,
)
_SIGNS: dict[str, Operator] = {"=": "==", "<>": "!="}
_KEYWORDS = {"and", "or", "not", "in", "is", "null", "true", "false"}


class FilterError(ValueError):
    """A filter that can't be read; the message says what and where."""


@dataclass(frozen=True)
class Compare:
    """A column against a value; a missing value of an item never matches."""

    column: str
    operator: Operator
    value: float | str | bool


@dataclass(frozen=True)
class Null:
    """Whether an item has no value in a column."""

    column: str
    missing: bool


@dataclass(frozen=True)
class Every:
    """All of the conditions; true if there are none."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class Some:
    """At least one of the conditions."""

    parts: tuple["Condition", ...]


Condition = Compare | Null | Every | Some


def parse_filter(text: str, types: Mapping[str, Type]) -> Condition:
    """Return the conditions that a filter spells over columns of these types, or FilterError."""
    if len(text) > LONGEST:
        raise FilterError(f"the filter has {len(text):,} characters; at most {LONGEST:,}")
    return _Parser(text, types).whole()


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    """Counted from 1, as people do."""


class _Parser:
    """Recursive descent; `negated` says whether a `not` stands around what is read."""

    def __init__(self, text: str, types: Mapping[str, Type]) -> None:
        self.types = types
        self.tokens = _tokens(text)
        self.depth = 0

    def whole(self) -> Condition:
        condition = self._either(False)
        if self._next.kind != "end":
            raise self._expected("and, or, or the end")
        return condition

    @property
    def _next(self) -> _Token:
        return self.tokens[0]

    def _take(self) -> _Token:
        return self.tokens.pop(0)

    def _is(self, *words: str) -> bool:
        """Return whether the next token is one of these keywords or signs."""
        token = self._next
        return token.kind in ("word", "sign") and token.text.lower() in words

    def _expect(self, word: str) -> None:
        if not self._is(word):
            raise self._expected(word)
        self._take()

    def _expected(self, what: str) -> FilterError:
        token = self._next
        got = "the end" if token.kind == "end" else token.text
        return FilterError(f"expected {what} at character {token.at}, got {got}")

    def _either(self, negated: bool) -> Condition:
        parts = [self._both(negated)]
        while self._is("or"):
            self._take()
            parts.append(self._both(negated))
        return _joined(parts, every=negated)

    def _both(self, negated: bool) -> Condition:
        parts = [self._one(negated)]
        while self._is("and"):
            self._take()
            parts.append(self._one(negated))
        return _joined(parts, every=not negated)

    def _one(self, negated: bool) -> Condition:
        if self.depth == DEEPEST:
            raise FilterError(f"more than {DEEPEST} levels at character {self._next.at}")
        self.depth += 1
        try:
            if self._is("not"):
                self._take()
                return self._one(not negated)
            if self._is("("):
                self._take()
                condition = self._either(negated)
                self._expect(")")
                return condition
            return self._comparison(negated)
        finally:
            self.depth -= 1

    def _comparison(self, negated: bool) -> Condition:
        if self._next.kind in ("number", "text") or self._is("true", "false", "null"):
            value = self._take()
            operator = self._operator()
            return self._test(self._column(), _MIRRORED.get(operator, operator), value, negated)
        column = self._column()
        if self._is("is"):
            self._take()
            missing = not self._is("not")
            if not missing:
                self._take()
            self._expect("null")
            return Null(column, missing != negated)
        if self._is("not", "in"):
            return self._membership(column, negated)
        if self._next.kind == "sign" and not self._is(")", "(", ","):
            operator = self._operator()
            return self._test(column, operator, self._value(), negated)
        if self.types[column] != "bool":
            raise self._expected(f"a comparison of {column}, such as == or <,")
        return Compare(column, "==", not negated)

    def _membership(self, column: str, negated: bool) -> Condition:
        if self._is("not"):
            self._take()
            negated = not negated
        self._expect("in")
        self._expect("(")
        parts = [self._test(column, "==", self._value(), negated)]
        while self._is(","):
            self._take()
            parts.append(self._test(column, "==", self._value(), negated))
        self._expect(")")
        return _joined(parts, every=negated)

    def _column(self) -> str:
        token = self._next
        if token.kind not in ("word", "quoted") or self._is(*_KEYWORDS):
            raise self._expected("a column")
        name = token.text
        if token.kind == "quoted":
            name = name[1:-1].replace("``", "`")
        if name not in self.types:
            name = name.lower()  # as the header of a table is read
        if name not in self.types:
            known = ", ".join(f"{known} ({kind})" for known, kind in self.types.items())
            raise FilterError(f"no column {name} at character {token.at}; there are {known}")
        self._take()
        return name

    def _operator(self) -> Operator:
        if self._next.kind != "sign" or self._is("(", ")", ","):
            raise self._expected("a comparison, such as == or <,")
        text = self._take().text
        return _SIGNS.get(text, text)  # type: ignore[return-value, arg-type, unused-ignore]

    def _value(self) -> _Token:
        if self._next.kind in ("number", "text") or self._is("true", "false", "null"):
            return self._take()
        raise self._expected("a value (a number, 'text' in quotes, true, false or null)")

    def _test(self, column: str, operator: Operator, token: _Token, negated: bool) -> Condition:
        kind = self.types[column]
        word = token.text.lower()
        is_value = token.kind != "word"
        if not is_value and word == "null":
            if operator not in ("==", "!="):
                raise FilterError(
                    f"null at character {token.at} can't be ordered; use is null or is not null"
                )
            return Null(column, (operator == "==") != negated)
        value: Value = None
        if token.kind == "number" and kind == "number":
            value = read_number(token.text)
        elif token.kind == "text" and kind in ("text", "date"):
            value = read_value(_unquoted(token.text), kind)
        elif not is_value and kind == "bool" and operator in ("==", "!="):
            value = word == "true"
        if value is None:
            raise FilterError(f"{_needs(column, kind)}; got {token.text} at character {token.at}")
        return Compare(column, _OPPOSITE[operator] if negated else operator, value)


def read_number(text: str) -> float | None:
    """Return a number that is finite."""
    number = float(text)
    return number if abs(number) != float("inf") else None


def _needs(column: str, kind: Type) -> str:
    needs = {
        "number": "is compared with a number",
        "text": "is compared with text in quotes",
        "date": "is compared with a date in quotes, such as '2024-05-31' or '2024-05-31 18:00'",
        "bool": "is compared by == or != with true or false",
    }
    return f"{column} {needs[kind]}"


def _unquoted(text: str) -> str:
    return text[1:-1].replace(text[0] * 2, text[0])


def _joined(parts: list[Condition], *, every: bool) -> Condition:
    if len(parts) == 1:
        return parts[0]
    return Every(tuple(parts)) if every else Some(tuple(parts))


def _tokens(text: str) -> list[_Token]:
    tokens, at = list[_Token](), 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        if at == len(text):
            return [*tokens, _Token("end", "", at + 1)]
        found = _TOKEN.match(text, at)
        if found is None:
            what = f"an unclosed {text[at]}" if text[at] in "'\"`" else f"{text[at]!r}"
            raise FilterError(f"can't read {what} at character {at + 1}")
        assert found.lastgroup is not None
        tokens.append(_Token(found.lastgroup, found.group(), at + 1))
        at = found.end()
