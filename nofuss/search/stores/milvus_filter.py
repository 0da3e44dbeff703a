"""A filter in the language of Milvus."""

import json

from nofuss.search.columns import LABEL
from nofuss.search.where import Compare, Condition, Every, Null


def expression(where: Condition) -> str:
    """Return a filter in the language of Milvus, which has no parameters before version 2.5."""
    if isinstance(where, Compare):
        if where.column == LABEL:
            field, known = "label", 'label != ""'
        else:
            field = f"columns[{quoted(where.column)}]"
            known = f"(exists {field})"  # in parentheses, or it takes `and` in
        test = f"{field} {where.operator} {_literal(where.value)}"
        # For `!=`, and for labels, something without a value would match.
        return f"({known} and {test})"
    if isinstance(where, Null):
        if where.column == LABEL:
            return 'label == ""' if where.missing else 'label != ""'
        exists = f"exists columns[{quoted(where.column)}]"
        return f"(not {exists})" if where.missing else f"({exists})"
    if not where.parts:
        return "id >= 0" if isinstance(where, Every) else "id < 0"
    word = " and " if isinstance(where, Every) else " or "
    return f"({word.join(expression(part) for part in where.parts)})"


def _literal(value: float | str | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(float(value))


def quoted(value: str) -> str:
    """Return a text in quotes, as Go reads it: JSON without escaped pairs of surrogates."""
    return json.dumps(value, ensure_ascii=False)
