"""Read our docstrings for the API reference: parameters as `name: text`, examples as doctests.

Griffe, which mkdocstrings uses, knows Google's style, so paragraphs of that form become an `Args:`
section and doctests an `Examples:` section. A word before a colon that is no parameter of the
function stays text.
"""

import re
from textwrap import dedent
from typing import Any

from griffe import Class, Extension, Function

_ENTRY = re.compile(r"(?:(?<=\. )|(?<=^))(\w+(?:, \w+)*): ")


class HouseStyle(Extension):
    """Rewrite docstrings of functions and classes before they are parsed."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Rewrite the docstring of a function with the names of its parameters."""
        _rewrite(func, {name.name.lstrip("*") for name in func.parameters})

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Rewrite the docstring of a class with the parameters of its constructor."""
        init = cls.members.get("__init__")
        names = (
            {p.name.lstrip("*") for p in init.parameters} if isinstance(init, Function) else set()
        )
        _rewrite(cls, names)


def _rewrite(owner: Function | Class, names: set[str]) -> None:
    if owner.docstring is None or "Args:\n" in owner.docstring.value:
        return
    paragraphs = owner.docstring.value.split("\n\n")
    texts: list[str] = []
    entries: list[str] = []
    examples: list[str] = []
    for paragraph in paragraphs:
        if paragraph == "Example::":
            continue
        if paragraph.lstrip().startswith(">>>"):
            examples.append(dedent(paragraph))
        elif found := _entries(paragraph, names):
            before, listed = found
            texts += [before] if before else []
            entries += listed
        else:
            texts.append(paragraph)
    if entries:
        texts.append("Args:\n" + "\n".join(f"    {entry}" for entry in entries))
    if examples:
        lines = "\n\n".join(examples).replace("  # doctest: +SKIP", "").splitlines()
        texts.append("Examples:\n" + "\n".join(f"    {line}" for line in lines))
    owner.docstring.value = "\n\n".join(texts)


def _entries(paragraph: str, names: set[str]) -> tuple[str, list[str]] | None:
    """Return the text before the first parameter, and a line for each; None if there is none."""
    text = " ".join(paragraph.split())
    starts = [m for m in _ENTRY.finditer(text) if set(m[1].split(", ")) <= names]
    if not starts:
        return None
    ends = [m.start() for m in starts[1:]] + [len(text)]
    listed = [
        f"{name}: {text[m.end() : end].strip()}"
        for m, end in zip(starts, ends, strict=True)
        for name in m[1].split(", ")
    ]
    return text[: starts[0].start()].strip(), listed
