"""Fenced blocks of Markdown pages, and what the commands in them mean."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its line, and why it is not run, if it is not."""

    kind: str
    body: str
    line: int
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, without those that only include a file."""
    text = page.read_text()
    found = [
        Block(m["kind"].strip(), _dedented(m), text[: m.start("body")].count("\n"), m["reason"])
        for m in _FENCE.finditer(text)
    ]
    return [block for block in found if not block.body.startswith("--8<--")]


def _dedented(match: re.Match[str]) -> str:
    indent = len(match["indent"])
    return "".join(line[indent:] for line in match["body"].splitlines(keepends=True))


def mentions(page: Path) -> list[list[str]]:
    """Commands of ours in running text, between backticks, without those that have an …"""
    text = _FENCE.sub("", page.read_text())
    found = re.findall(r"`nofuss( [^`]+)`", text)
    return [shlex.split(words) for words in found if "…" not in words]


def commands(block: Block) -> list[list[str]]:
    """The command lines of a block, without comments; a line that ends in \\ is continued.

    A block without a language may be something else, such as a tree of files.
    """
    first = block.body.split(maxsplit=1)[0]
    if block.kind not in ("", "bash") or (not block.kind and "/" in first):
        return []
    lines = block.body.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words]
