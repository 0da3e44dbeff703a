"""SVG drawings as ElementTree elements, which escape every name they hold.

`drawing` is the only place where markup is marked as safe for the templates.
"""

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element, tostring

from markupsafe import Markup


def shape(name: str, /, **attributes: Any) -> Element:
    """Return an SVG element; `class_` stands for class, other underscores for hyphens.

    Attributes that are None are omitted.
    """
    named = {
        key.rstrip("_").replace("_", "-"): _number(value)
        if isinstance(value, float)
        else str(value)
        for key, value in attributes.items()
        if value is not None
    }
    return Element(name, named)


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str | None = None,
    fill: str | None = None,
    class_: str | None = None,
) -> Element:
    """Return a text element; `fill` overrides the style sheet."""
    style = f"fill: {fill}" if fill else None
    element = shape("text", x=float(x), y=float(y), text_anchor=anchor, style=style, class_=class_)
    element.text = words
    return element


def drawing(width: float, height: float, label: str, shapes: Sequence[Element]) -> Markup:
    """Return an <svg> element as markup; screen readers read out its label."""
    root = shape("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)
    root.extend(shapes)
    return Markup(tostring(root, encoding="unicode"))  # ElementTree has escaped all names


def _number(value: float) -> str:
    """Return at most two decimals: a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
