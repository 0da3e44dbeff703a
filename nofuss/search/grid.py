"""Draw search results as one picture: a row a query, the query on the left, then neighbours."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from nofuss.data.decode import PictureError, decode

CELL, TEXT, GAP = 160, 34, 10
_INK, _FAINT, _PAPER = "#1a1a1a", "#777777", "#ffffff"

Cell = tuple[Path | Image.Image | None, str, str]
"""A picture (None: cannot be shown), and two lines of text below it."""


def draw_grid(rows: Sequence[Sequence[Cell]]) -> Image.Image:
    """Draw rows of cells, a line after the first cell of each; rows may differ in length."""
    columns = max((len(row) for row in rows), default=1)
    width = columns * (CELL + GAP) + 2 * GAP
    height = len(rows) * (CELL + TEXT + GAP) + GAP
    grid = Image.new("RGB", (width, height), _PAPER)
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(12)
    for r, row in enumerate(rows):
        top = GAP + r * (CELL + TEXT + GAP)
        for c, (picture, first, second) in enumerate(row):
            left = GAP + c * (CELL + GAP) + (GAP if c else 0)
            shown = _thumbnail(picture)
            x, y = left + (CELL - shown.width) // 2, top + (CELL - shown.height) // 2
            grid.paste(shown, (x, y))
            pen.text((left, top + CELL + 2), _fitted(first, pen, font), _INK, font)
            pen.text((left, top + CELL + 17), _fitted(second, pen, font), _FAINT, font)
        line = 2 * GAP + CELL - 2
        pen.line((line, top, line, top + CELL + TEXT), "#dddddd", 2)
    return grid


def _thumbnail(picture: Path | Image.Image | None) -> Image.Image:
    if isinstance(picture, Path):
        try:
            picture = decode(picture, at_least=CELL)
        except PictureError:
            picture = None
    if picture is None:
        return Image.new("RGB", (CELL, CELL), "#eeeeee")
    return ImageOps.contain(picture.convert("RGB"), (CELL, CELL))


def _fitted(
    text: str, pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> str:
    """Return as much of the text's end as fits below a picture: names differ at the end."""
    text = " ".join(text.split())
    if pen.textlength(text, font) <= CELL:
        return text
    while text and pen.textlength(f"…{text}", font) > CELL:
        text = text[1:]
    return f"…{text}"
