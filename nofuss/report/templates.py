"""Jinja2 templates → HTML pages: whatever a class or a file is called, it is text, never markup.

Autoescape is on for every value; only the drawings of svg.py arrive as markup. A value that is
missing is an error, not an empty string.
"""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> bytes:
    """Return the page that a template makes of these values; `template` is a path in nofuss/."""
    page = _environment().get_template(template).render(**values)
    # File names may hold surrogates, which UTF-8 can't encode; they become character references.
    return page.encode("utf-8", "xmlcharrefreplace")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("nofuss", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "anchor": _anchor,
        "count": _count,
        "percent": _percent,
        "sentence": _sentence,
    }
    return environment


def _anchor(title: str) -> str:
    """Return the id of the section with this title."""
    return title.lower().replace(" ", "-")


def _count(number: int) -> str:
    """Return 1234 as 1,234."""
    return f"{number:,}"


def _percent(share: float, digits: int = 0) -> str:
    """Return a share in percent, without the sign."""
    return f"{100 * share:.{digits}f}"


def _sentence(words: str) -> str:
    """Return words with a capital at their start and a full stop at their end."""
    return f"{words[0].upper()}{words[1:]}." if words else ""
