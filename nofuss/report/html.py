"""HTML and SVG as trees: whatever a class or a file is called, it is text, never markup."""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element, fromstring, tostring

Child = Element | str | float | None | Sequence["Child"]


def tag(name: str, /, *children: Child, **attributes: Any) -> Element:
    """An element. `class_` is class, other underscores are hyphens; None leaves one out."""
    named = {
        key.rstrip("_").replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for key, value in attributes.items()
        if value is not None
    }
    element = Element(name, named)
    _append(element, children)
    return element


def document(root: Element) -> bytes:
    """The page as bytes; what UTF-8 can't hold becomes a character reference."""
    text = "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
    return text.encode("utf-8", "xmlcharrefreplace")


def fragment(element: Element) -> str:
    """An element as text, to be kept and put into a page later by `from_fragment`."""
    return tostring(element, encoding="unicode")


def from_fragment(text: str) -> Element:
    """The element that `fragment` wrote."""
    return fromstring(text)


def _append(element: Element, children: Child) -> None:
    if children is None:
        return
    if isinstance(children, Element):
        element.append(children)
    elif isinstance(children, Sequence) and not isinstance(children, str):
        for child in children:
            _append(element, child)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + str(children)
    else:
        element.text = (element.text or "") + str(children)
