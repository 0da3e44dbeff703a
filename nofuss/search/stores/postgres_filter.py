"""A filter as SQL: values are parameters, names of columns are quoted by psycopg."""

from collections.abc import Mapping
from typing import Any

from nofuss.data.columns import Type
from nofuss.search.columns import LABEL
from nofuss.search.where import Compare, Condition, Every, Null

_OPERATOR = {"==": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_JSON = {"number": "number", "bool": "boolean", "text": "string", "date": "string"}
_CAST = {"number": "::float8", "bool": "::boolean", "text": "", "date": ""}
# By bytes, whatever the database's language: as Python orders text, and Milvus.
_ORDER = {"number": "", "bool": "", "text": ' COLLATE "C"', "date": ' COLLATE "C"'}


def value_sql(column: str, kind: Type) -> Any:
    """Return the SQL of a column's value; NULL where an item has none, or one of another type."""
    from psycopg import sql

    if column == LABEL:
        return sql.SQL('label COLLATE "C"')
    text = (
        f"(CASE WHEN jsonb_typeof(columns -> {{0}}) = '{_JSON[kind]}' "
        f"THEN (columns ->> {{0}}){_CAST[kind]} END){_ORDER[kind]}"
    )
    return sql.SQL(text).format(sql.Literal(column))


def condition_sql(where: Condition, types: Mapping[str, Type], values: list[Any]) -> Any:
    """Return a filter as SQL; append its parameters to `values`."""
    from psycopg import sql

    if isinstance(where, Compare | Null):
        # Doubled, as psycopg takes %s in a query with parameters for one of them.
        value = value_sql(where.column.replace("%", "%%"), types[where.column])
        if isinstance(where, Null):
            return value + sql.SQL(" IS NULL" if where.missing else " IS NOT NULL")
        values.append(where.value)
        return value + sql.SQL(f" {_OPERATOR[where.operator]} %s")
    every = isinstance(where, Every)
    if not where.parts:
        return sql.SQL("true" if every else "false")
    parts = [condition_sql(part, types, values) for part in where.parts]
    return sql.SQL("({})").format(sql.SQL(" AND " if every else " OR ").join(parts))
