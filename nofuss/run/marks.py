"""Marks "same" and "not the same" that somebody gave to results of a search: RUN/marks.jsonl.

A line a mark, only ever appended: {"query", "item", "same", "time"}, where `same` null takes an
earlier mark back. Of several marks of a pair the last one counts. A line that is not whole, as a
kill or a full disk leaves it, is passed over and counted.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nofuss.files import append_lines, check_regular, csv_text, parse_json, read_bytes

FILE = "marks.jsonl"
LARGEST = 64 * 2**20
"""Most bytes of the file."""
PICTURE = "picture "
"""Begins the query of a mark where it was a picture that somebody sent, which is not kept."""


@dataclass
class Marks:
    """The marks in force."""

    by_query: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Query → item → whether they are the same; in the order in which they were first given."""
    lines: int = 0
    torn: int = 0
    """Lines that are not whole."""

    def __len__(self) -> int:
        return sum(map(len, self.by_query.values()))

    def pairs(self) -> list[tuple[str, str, bool]]:
        """Return pairs of items; a picture that is not kept is replaced by its first same item."""
        found = []
        for query, marks in self.by_query.items():
            pivot: str | None = query
            if query.startswith(PICTURE):
                pivot = next((item for item, same in marks.items() if same), None)
            if pivot is not None:
                found += [(pivot, item, same) for item, same in marks.items() if item != pivot]
        return found

    def as_csv(self, names: Mapping[str, str]) -> bytes:
        """Return query, item, same as a table; names: what to call the items."""
        rows = [("query", "item", "same")]
        for query, marks in self.by_query.items():
            for item, same in marks.items():
                word = "same" if same else "not the same"
                rows.append((names.get(query, query), names.get(item, item), word))
        return csv_text(rows).encode("utf-8", "backslashreplace")


def append_marks(run: Path, query: str, marks: Iterable[tuple[str, bool | None]]) -> None:
    """Append marks of one query: (item, same), None to take one back."""
    now = int(time.time())
    lines = [
        json.dumps({"query": query, "item": item, "same": same, "time": now})
        for item, same in marks
    ]
    if (run / FILE).exists():
        check_regular(run / FILE, limit=LARGEST - sum(map(len, lines)) - len(lines))
    append_lines(run / FILE, lines)


def read_marks(run: Path, lines: int | None = None) -> Marks:
    """Read the marks of a run, or those in its first lines; none where there is no file."""
    marks = Marks()
    try:
        content = read_bytes(run / FILE, limit=LARGEST)
    except FileNotFoundError:
        return marks
    for line in content.split(b"\n"):
        if not line or marks.lines == lines:
            continue
        marks.lines += 1
        query, item, same = _parsed(line)
        if query is None or item is None:
            marks.torn += 1
            continue
        of_query = marks.by_query.setdefault(query, {})
        if same is None:
            of_query.pop(item, None)
        else:
            of_query[item] = same
    marks.by_query = {query: of for query, of in marks.by_query.items() if of}
    return marks


def _parsed(line: bytes) -> tuple[str | None, str | None, bool | None]:
    """Return query, item and mark of a line; None for what is something else."""
    try:
        stored: Any = parse_json(line)
    except ValueError:
        return None, None, None
    if not isinstance(stored, dict) or not isinstance(stored.get("same", ""), bool | None):
        return None, None, None
    query, item = stored.get("query"), stored.get("item")
    is_whole = isinstance(query, str) and isinstance(item, str)
    return (query, item, stored["same"]) if is_whole else (None, None, None)
