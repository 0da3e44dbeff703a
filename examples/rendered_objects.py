"""Render pictures of objects to try nofuss on: python examples/rendered_objects.py objects

Forty classes, a folder each: mugs, vases, bottles, bowls, lamps, chairs, boxes and teapots, five
of each, which differ in proportions and pattern. Every picture has a viewpoint,
light, table and wall of its own. Drawn by marching rays through signed distances in numpy, half a
second a picture; use the pictures for anything.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]  # float32
Distance = Callable[[Array], Array]  # points (3, N) → signed distances (N,)
Paint = Callable[[Array], Array]  # points (3, N) → colours (3, N)
Random = np.random.Generator
WHITE, DARK, CREAM = "white", "charcoal", "cream"  # glazes that go with all others
COLOURS = {
    WHITE: (0.86, 0.84, 0.79),
    DARK: (0.06, 0.06, 0.07),
    CREAM: (0.80, 0.68, 0.47),
    "red": (0.55, 0.05, 0.04),
    "orange": (0.80, 0.26, 0.03),
    "yellow": (0.83, 0.58, 0.06),
    "olive": (0.23, 0.25, 0.05),
    "green": (0.04, 0.24, 0.11),
    "teal": (0.02, 0.27, 0.29),
    "blue": (0.03, 0.11, 0.42),
    "sky": (0.24, 0.48, 0.66),
    "plum": (0.22, 0.04, 0.20),
    "rose": (0.70, 0.27, 0.29),
    "brown": (0.20, 0.09, 0.04),
}


# ---- Shapes: signed distances


def length(*parts: Array) -> Array:
    """Return the Euclidean length."""
    return np.sqrt(sum(part * part for part in parts))


def box(half: tuple[float, ...], at: tuple[float, ...] = (0, 0, 0), soft: float = 0.03) -> Distance:
    """Return a box with rounded edges."""
    size, centre = (np.array(v, np.float32)[:, None] for v in (half, at))

    def distance(p: Array) -> Array:
        q = np.abs(p - centre) - (size - soft)
        return length(*np.maximum(q, 0)) + np.minimum(q.max(0), 0) - soft

    return distance


def rod(a: tuple[float, ...], b: tuple[float, ...], start: float, end: float) -> Distance:
    """Return a round rod from a to b whose radius changes from start to end."""
    first = np.array(a, np.float32)[:, None]
    along = np.array(b, np.float32)[:, None] - first

    def distance(p: Array) -> Array:
        share = np.clip(((p - first) * along).sum(0) / (along**2).sum(), 0, 1)
        return length(*(p - first - along * share)) - (start + (end - start) * share)

    return distance


def handle(
    x: float, y: float, wide: float, high: float, thick: float, lean: float = 0.0
) -> Distance:
    """Return a bent handle in the plane z = 0, beside a vessel whose wall is at x and may lean."""

    def distance(p: Array) -> Array:
        ring = (length((p[0] - x) / wide, (p[1] - y) / high) - 1) * min(abs(wide), high)
        wall = x + lean * (p[1] - y) - p[0]
        return np.maximum(length(ring, p[2]) - thick, np.sign(wide) * wall - 0.02)

    return distance


def lathe(profile: list[tuple[float, float]], wall: float = 0.0) -> Distance:
    """Turn a smooth curve through points (radius, height); with a wall it is an open vessel.

    One that does not begin on the table is open below, too. The distance to the curve is computed
    once on a grid, and looked up.
    """
    points = np.array([profile[0], *profile, profile[-1]], float)
    steps = np.linspace(0, 1, 12, endpoint=False)[:, None]
    curve = [  # Catmull and Rom's spline; a point that is given twice is a corner
        0.5 * (2 * b + (c - a) * steps + (2 * a - 5 * b + 4 * c - d) * steps**2
               + (3 * b - a - 3 * c + d) * steps**3)
        for a, b, c, d in zip(points, points[1:], points[2:], points[3:], strict=False)
    ]  # fmt: skip
    line = np.vstack([*curve, points[-1:]])
    if wall:
        direction = np.gradient(line, axis=0)
        direction /= np.linalg.norm(direction, axis=1, keepdims=True) + 1e-9
        inner = line - wall * direction[:, ::-1] * (1, -1)
        line = np.vstack([line, inner[inner[:, 1] > wall][::-1]])
    ends = ([0, line[0, 1]], [0, line[-1, 1]]) if line[0, 1] < 0.1 or not wall else ((), line[0])
    line = np.vstack([np.reshape(ends[0], (-1, 2)), np.maximum(line, (0, -9)), ends[1]])
    cell, margin = 0.012, 0.06
    low = np.array([0, line[:, 1].min() - margin])
    shape = np.ceil((line.max(0) + margin - low) / cell).astype(int) + 1
    spots = low + cell * np.moveaxis(np.indices(shape), 0, -1).reshape(-1, 1, 2)  # (cells, 1, 2)
    a, b = line, np.roll(line, -1, 0)
    edge = (b - a)[:-1]  # the last one runs along the axis
    share = ((spots - a[:-1]) * edge).sum(-1) / ((edge**2).sum(-1) + 1e-12)
    gap = spots - a[:-1] - edge * np.clip(share, 0, 1)[..., None]
    above = (a[:, 1] > spots[..., 1]) != (b[:, 1] > spots[..., 1])
    crossing = a[:, 0] + (spots[..., 1] - a[:, 1]) * (b - a)[:, 0] / ((b - a)[:, 1] + 1e-12)
    inside = (above & (spots[..., 0] < crossing)).sum(1) % 2 == 1
    grid = np.sqrt((gap**2).sum(-1).min(1)) * np.where(inside, -1, 1)
    grid = grid.reshape(shape).astype(np.float32).ravel()

    def distance(p: Array) -> Array:
        at = np.stack([length(p[0], p[2]), p[1] - low[1]]).astype(np.float32)
        limit = ((shape - 1.001) * cell).astype(np.float32)[:, None]
        near = np.clip(at, 0, limit)
        beyond = length(*(at - near))
        (i, j), (s, t) = np.divmod(near / np.float32(cell), 1)
        k = (i * shape[1] + j).astype(np.intp)
        upper = grid[k + shape[1]] * (1 - t) + grid[k + shape[1] + 1] * t
        found = (grid[k] * (1 - t) + grid[k + 1] * t) * (1 - s) + upper * s
        return np.where(beyond > 0, np.maximum(beyond + margin / 2, found - beyond), found)

    return distance


def joined(*shapes: Distance) -> Distance:
    """Return several shapes as one."""
    return lambda p: np.min([shape(p) for shape in shapes], axis=0)


# ---- Patterns and paint


def fraction(x: Array) -> Array:
    """Return what is behind the point."""
    return x - np.floor(x)


PATTERNS: dict[str, Callable[[Array, Array], Array]] = {  # of surface coordinates, u around
    "striped": lambda u, v: fraction(v) < 0.45,
    "fluted": lambda u, v: fraction(u) < 0.4,
    "dotted": lambda u, v: length(
        fraction(u + 0.5 * (np.floor(v) % 2)) - 0.5, fraction(v) - 0.5
    ) < 0.27,
    "checked": lambda u, v: (np.floor(u) + np.floor(v)) % 2,
    "zigzag": lambda u, v: fraction(v + np.abs(fraction(u) - 0.5)) < 0.4,
    "wavy": lambda u, v: fraction(v + 0.18 * np.sin(2 * np.pi * u)) < 0.3,
    "ringed": lambda u, v: np.abs(fraction(v / 2) - 0.5) < 0.07,
}  # fmt: skip


def solid(colour: str) -> Paint:
    """Paint everything in one colour."""
    return lambda p: np.repeat(np.array(COLOURS[colour], np.float32)[:, None], p.shape[1], 1)


def blend(mask: Array, first: Array, second: Array) -> Array:
    """Return the second colour where the mask is 1."""
    return first + (second - first) * mask


@dataclass(frozen=True)
class Style:
    """What distinguishes a class from others of its family."""

    first: str
    second: str
    pattern: str
    fine: float
    shape: Array
    """Numbers from 0 to 1 that the family turns into proportions."""

    def around(self, radius: float = 0.4, low: float = -9, high: float = 9) -> Paint:
        """Paint the pattern around the axis, between two heights."""
        turns = max(3, round(2 * np.pi * radius * self.fine))
        first, second = solid(self.first), solid(self.second)

        def paint(p: Array) -> Array:
            u = np.arctan2(p[2], p[0]) * np.float32(turns / 2 / np.pi)
            mask = PATTERNS[self.pattern](u, p[1] * np.float32(self.fine)).astype(np.float32)
            return blend(mask * ((p[1] > low) & (p[1] < high)), first(p), second(p))

        return paint

    def flat(self, p: Array) -> Array:
        """Paint the pattern on the sides of a box."""
        u, v = p[0] + p[2], p[1] + np.where(p[1] > 0.99 * p[1].max(), p[0] - p[2], 0)
        mask = PATTERNS[self.pattern](u * np.float32(self.fine), v * np.float32(self.fine))
        return blend(mask.astype(np.float32), solid(self.first)(p), solid(self.second)(p))


def noise(u: Array, v: Array) -> Array:
    """Return smooth random values from 0 to 1 over the plane."""
    i, j = np.floor(u).astype(np.int64), np.floor(v).astype(np.int64)
    s, t = (u - i).astype(np.float32), (v - j).astype(np.float32)
    s, t = s * s * (3 - 2 * s), t * t * (3 - 2 * t)
    a, b, c, d = (_LATTICE[(i + x) & 255, (j + y) & 255] for x in (0, 1) for y in (0, 1))
    return a + (b - a) * t + (c - a + (a - b - c + d) * t) * s


_LATTICE = np.random.default_rng(5).random((256, 256), np.float32)


def clouds(u: Array, v: Array, octaves: int = 4) -> Array:
    """Return noise with finer and finer detail, about 0 to 1."""
    return sum(noise(u * 2**k + 17 * k, v * 2**k) / 2**k for k in range(octaves)) / 1.9


# ---- Families: a style becomes parts


@dataclass(frozen=True)
class Part:
    """A shape, its paint, how glossy it is (0 matt, 1 glazed) and how much it glows."""

    distance: Distance
    paint: Paint
    gloss: float = 0.8
    glow: float = 0.0


def mug(style: Style) -> list[Part]:
    """A cylinder, straight or tapered, with a handle."""
    a, b, c = style.shape[:3]
    top, foot, tall = 0.40 + 0.10 * a, 0.32 + 0.14 * b, 0.80 + 0.35 * c
    outline = [(foot, 0.0), (foot, 0.0), ((foot + top) / 2 + 0.03 * b, tall / 2), (top, tall)]
    bent = handle(
        (foot + top) / 2, tall * 0.52, 0.20 + 0.08 * c, tall * (0.24 + 0.06 * a), 0.05,
        lean=(top - foot) / tall,
    )  # fmt: skip
    return [
        Part(lathe(outline, wall=0.045), style.around(top, tall * 0.12, tall * 0.9)),
        Part(bent, solid(style.first)),
    ]


def vase(style: Style) -> list[Part]:
    """A belly and a neck."""
    a, b, c, d = style.shape[:4]
    tall, belly, neck = 1.25 + 0.5 * a, 0.32 + 0.24 * b, 0.12 + 0.16 * c
    outline = [
        (0.2 + 0.1 * d, 0.0), (0.2 + 0.1 * d, 0.0), (belly, tall * (0.25 + 0.3 * d)),
        (neck, tall * 0.82), (neck + 0.09, tall),
    ]  # fmt: skip
    return [Part(lathe(outline, wall=0.04), style.around(belly, tall * 0.1, tall * 0.75))]


def bottle(style: Style) -> list[Part]:
    """Dark glass with a label and a cap."""
    a, b, c = style.shape[:3]
    body, tall, shoulder = 0.26 + 0.1 * a, 1.45 + 0.4 * b, 0.50 + 0.16 * c
    neck = 0.09 + 0.03 * c
    glass = lathe([
        (body - 0.03, 0.0), (body, 0.03), (body, 0.2), (body, tall * shoulder),
        (neck, tall * (shoulder + 0.22)), (neck, tall * 0.95), (neck, tall), (neck, tall),
    ])  # fmt: skip
    low, high = 0.22 + 0.1 * b, tall * shoulder - 0.04
    label = lathe([(body + 0.006, low)] * 2 + [(body + 0.006, high)] * 2)
    cap = lathe([(neck + 0.02, tall * 0.9)] * 2 + [(neck + 0.02, tall + 0.03)] * 2)
    tint = ("green", "brown", "olive", DARK)[int(3.99 * style.shape[3])]
    return [
        Part(glass, solid(tint), 1.6),
        Part(label, style.around(body), 0.15),
        Part(cap, solid(style.second), 0.7),
    ]


def bowl(style: Style) -> list[Part]:
    """A wide open vessel, its inside in the second colour."""
    a, b, c = style.shape[:3]
    wide, tall, foot = 0.62 + 0.2 * a, 0.36 + 0.22 * b, 0.22 + 0.1 * c
    outline = [(foot, 0.0), (foot, 0.0), (foot, 0.05), (wide * 0.8, tall * 0.5), (wide, tall)]
    shape, outside, inside = lathe(outline, wall=0.045), style.around(wide), solid(style.second)

    def paint(p: Array) -> Array:
        at = np.interp(p[1], [0.05, tall * 0.5, tall], [foot, wide * 0.8, wide]) - 0.035
        return blend((length(p[0], p[2]) < at).astype(np.float32), outside(p), inside(p))

    return [Part(shape, paint)]


def lamp(style: Style) -> list[Part]:
    """A foot, a stem and a shade that glows."""
    a, b, c, d = style.shape[:4]
    tall, wide, narrow, shade = 1.5 + 0.3 * a, 0.42 + 0.14 * b, 0.18 + 0.2 * c, 0.5 + 0.15 * d
    foot = lathe([
        (0.28 + 0.08 * c, 0.0), (0.28 + 0.08 * c, 0.0), (0.26 + 0.08 * c, 0.05),
        (0.06 + 0.16 * d, 0.2 + 0.3 * b), (0.04, tall - shade * 0.5), (0.04, tall - shade * 0.5),
    ])  # fmt: skip
    hood = lathe([(wide, tall - shade)] * 2 + [(narrow, tall)] * 2, wall=0.02)
    return [
        Part(foot, solid(style.second), 0.9),
        Part(hood, style.around(wide), 0.1, glow=0.55),
    ]


def chair(style: Style) -> list[Part]:
    """A seat on four legs, and a back of slats."""
    a, b, c, d = style.shape[:4]
    wide, high, back, thick = 0.42 + 0.1 * a, 0.72 + 0.14 * b, 0.7 + 0.25 * c, 0.028 + 0.02 * d
    spread, parts = 0.06 * b, []
    for x in (-1, 1):
        for z in (-1, 1):
            top = (x * (wide - 0.05), high, z * (wide - 0.05))
            foot = (x * (wide - 0.05 + spread), thick, z * (wide - 0.05 + spread))
            parts.append(rod(foot, top, thick * 0.7, thick))
    lean = 0.1 + 0.1 * d
    for x in (-1, 1):
        post = (x * (wide - 0.05), high, -wide + 0.05)
        parts.append(rod(post, (post[0], high + back, post[2] - lean), thick, thick * 0.8))
    for share in np.linspace(0.45, 0.93, 2 + int(2.99 * a)):
        at = (0.0, high + back * share, -wide + 0.05 - lean * share)
        parts.append(box((wide - 0.05, 0.045 + 0.03 * c, 0.016), at, 0.015))
    seat = box((wide, 0.035 + 0.03 * d, wide), (0, high + 0.03, 0))

    return [Part(joined(*parts), solid(style.first), 0.45), Part(seat, style.flat, 0.2)]


def gift(style: Style) -> list[Part]:
    """A box with a lid, a ribbon and a bow."""
    a, b, c = style.shape[:3]
    wide, deep, tall = 0.42 + 0.18 * a, 0.36 + 0.14 * b, 0.26 + 0.26 * c
    body = box((wide, tall, deep), (0, tall, 0), 0.015)
    lid = box((wide + 0.025, 0.07, deep + 0.025), (0, 2 * tall, 0), 0.015)
    band = 0.05 + 0.03 * a
    ribbons = [
        box((band, tall + 0.045, deep + 0.03), (0, tall + 0.03, 0), 0.01),
        box((wide + 0.03, tall + 0.045, band), (0, tall + 0.03, 0), 0.01),
    ]

    def bow(p: Array) -> Array:
        x, y = np.abs(p[0]) - 0.15, p[1] - 2 * tall - 0.15
        ring = length(length(x, y * 1.3 + 0.3 * x) - 0.12, np.maximum(np.abs(p[2]) - 0.05, 0))
        return (ring - 0.018) * 0.75

    return [
        Part(body, style.flat, 0.25),
        Part(lid, style.flat, 0.25),
        Part(joined(*ribbons, bow), solid(style.second), 0.9),
    ]


def teapot(style: Style) -> list[Part]:
    """A round body with spout, handle and lid."""
    a, b, c = style.shape[:3]
    wide, tall = 0.46 + 0.14 * a, 0.62 + 0.28 * b
    body = lathe([
        (wide * 0.6, 0.0), (wide * 0.6, 0.0), (wide, tall * (0.35 + 0.25 * c)),
        (wide * 0.45, tall * 0.95), (wide * 0.42, tall), (wide * 0.3, tall + 0.07),
        (0.02, tall + 0.1),
    ])  # fmt: skip
    spout = [
        rod((wide * 0.75, tall * 0.3, 0), (wide + 0.2, tall * 0.55, 0), 0.13, 0.075),
        rod((wide + 0.2, tall * 0.55, 0), (wide + 0.36, tall * 0.98, 0), 0.075, 0.05),
    ]
    knob = rod((0, tall + 0.1, 0), (0, tall + 0.16, 0), 0.035, 0.06)
    bent = handle(-wide * 0.8, tall * 0.52, -0.34, tall * 0.36, 0.045)

    return [
        Part(body, style.around(wide, tall * 0.12, tall * 0.86)),
        Part(joined(*spout, bent), solid(style.first)),
        Part(knob, solid(style.second)),
    ]


FAMILIES: dict[str, tuple[Callable[[Style], list[Part]], float, float]] = {  # and radius, height
    "mug": (mug, 0.62, 0.95),
    "vase": (vase, 0.6, 1.5),
    "bottle": (bottle, 0.5, 1.7),
    "bowl": (bowl, 0.8, 0.5),
    "lamp": (lamp, 0.6, 1.65),
    "chair": (chair, 0.75, 1.65),
    "box": (gift, 0.75, 1.05),
    "teapot": (teapot, 0.95, 0.9),
}


def classes(random: Random) -> Iterator[tuple[str, str, Style]]:
    """Yield name, family and style of each class; a family has two colours, so looks are close."""
    for family in FAMILIES:
        glaze, other = map(str, random.permutation(list(COLOURS)[3:])[:2])
        other = str(random.choice([WHITE, CREAM, DARK, other]))
        one, two = map(str, random.permutation(list(PATTERNS))[:2])
        shape, second = random.random(6, np.float32), random.random(6, np.float32)
        fine = random.uniform(4, 8)
        looks = [
            Style(glaze, other, one, fine, shape),
            Style(glaze, other, one, fine, second),
            Style(glaze, other, one, fine * 1.5, shape),
            Style(glaze, other, two, fine, shape),
            Style(other, glaze, two, fine, second),
        ]
        for number, style in enumerate(looks, 1):
            yield f"{glaze} {family} {number}", family, style


# ---- Light, table, wall


@dataclass(frozen=True)
class Room:
    """Where a picture is taken: what a camera sees besides the object, and the light."""

    light: Array
    """The direction to the window (3, 1)."""
    warm: Array
    """The colour of its light (3, 1)."""
    table: Array
    accent: Array
    """The second colour of a cloth."""
    wall: Array
    grain: str
    turn: float
    softness: float

    @classmethod
    def drawn(cls, random: Random) -> "Room":
        """Draw a room at random."""
        around, up = random.uniform(0, 2 * np.pi), random.uniform(0.45, 1.2)
        light = np.array([np.cos(around) * np.cos(up), np.sin(up), np.sin(around) * np.cos(up)])
        tables = [
            (0.42, 0.25, 0.13), (0.60, 0.43, 0.26), (0.22, 0.13, 0.08), (0.70, 0.69, 0.67),
            (0.36, 0.36, 0.36), (0.62, 0.57, 0.48), (0.30, 0.37, 0.40), (0.50, 0.33, 0.30),
        ]  # fmt: skip
        walls = [
            (0.75, 0.74, 0.72), (0.55, 0.58, 0.60), (0.40, 0.46, 0.42), (0.66, 0.56, 0.48),
            (0.28, 0.31, 0.36), (0.72, 0.66, 0.55), (0.50, 0.36, 0.33),
        ]  # fmt: skip
        table = random.integers(len(tables))
        grains = ("wood", "wood", "wood", "stone", "stone", "linen", "cloth", "cloth")
        accent = np.array(list(COLOURS.values())[random.integers(len(COLOURS))], np.float32)
        column = [np.array(v, np.float32)[:, None] for v in (light, tables[table])]
        wall = np.array(walls[random.integers(len(walls))], np.float32)[:, None]
        warm = np.array([[1.0], [0.96], [0.90]]) * (1 + random.normal(0, 0.11, (3, 1)))
        return cls(
            column[0], warm.astype(np.float32), column[1], accent[:, None], wall, grains[table],
            random.uniform(0, 2 * np.pi), random.uniform(5, 14),
        )  # fmt: skip

    def table_colour(self, x: Array, z: Array) -> Array:
        """Return the colour of the table at points (N,)."""
        cos, sin = np.float32(np.cos(self.turn)), np.float32(np.sin(self.turn))
        u, v = cos * x + sin * z, cos * z - sin * x
        if self.grain == "wood":
            plank = np.floor(v * 1.6 + 0.5)
            fibre = clouds(u * 1.2 + plank * 7.3, v * 22 + plank * 3.1, 3)
            tone = 0.62 + 0.55 * fibre + 0.12 * (noise(plank * 5.7, plank * 0 + 2.2) - 0.5)
            tone *= 1 - 0.6 * _step(0.02 - np.abs(fraction(v * 1.6) - 0.5), 0.02)
        elif self.grain == "stone":
            tone = 0.78 + 0.35 * clouds(u * 2.2, v * 2.2, 5)
        else:
            weave = np.sin(u * 170) * np.sin(v * 170)
            tone = 0.88 + 0.07 * weave + 0.2 * (clouds(u * 3, v * 3) - 0.5)
        if self.grain == "cloth":
            lines = (fraction(u * 2) < 0.3) * 0.5 + (fraction(v * 2) < 0.3) * 0.5
            return blend(lines, self.table, self.accent) * tone
        return self.table * tone

    def seen(self, d: Array) -> Array:
        """Return the light from directions (3, N): the room, with a large window."""
        sky = np.clip(d[1] * 0.5 + 0.5, 0, 1)
        wall = self.wall * (0.25 + 0.75 * sky)
        side = np.cross(self.light[:, 0], (0, 1, 0)).astype(np.float32)
        side /= np.linalg.norm(side)
        up = np.cross(side, self.light[:, 0]).astype(np.float32)
        front = np.maximum((d * self.light).sum(0), 1e-3)
        u, v = (side @ d) / front, (up @ d) / front
        pane = _step(0.5 - np.abs(u), 0.06) * _step(0.62 - np.abs(v), 0.06) * (front > 0.1)
        bars = _step(np.abs(u) - 0.02, 0.02) * _step(np.abs(v) - 0.02, 0.02)
        return np.where(d[1] > 0, wall, self.table * 0.5) + 16 * self.warm * pane * bars


def _step(x: Array, width: float) -> Array:
    """Rise from 0 to 1 around zero."""
    share = np.clip(x / width * 0.5 + 0.5, 0, 1)
    return share * share * (3 - 2 * share)


# ---- Rendering


def march(distance: Distance, origin: Array, d: Array, near: Array, far: Array) -> Array:
    """Return how far each ray goes until it meets the surface; infinity where it never does."""
    t, rows = near.copy(), np.flatnonzero(near < far)
    hit = np.full(len(t), np.inf, np.float32)
    for _ in range(96):
        if not len(rows):
            break
        gap = distance(origin + d[:, rows] * t[rows])
        close = gap < 6e-4
        hit[rows[close]] = t[rows[close]]
        t[rows] += gap * 0.85
        rows = rows[~close & (t[rows] < far[rows])]
    return hit


def span(origin: Array, d: Array, centre: Array, radius: float) -> tuple[Array, Array]:
    """Return where rays enter and leave a ball; near is beyond far where they miss it."""
    offset = origin - centre
    half = (offset * d).sum(0)
    room = half * half - (offset * offset).sum(0) + np.float32(radius**2)
    root = np.sqrt(np.maximum(room, 0))
    return np.maximum(-half - root, 0), np.where(room > 0, -half + root, -1)


def shadow(distance: Distance, p: Array, room: Room, ball: tuple[Array, float]) -> Array:
    """Return how much of the window each point sees."""
    direction = np.broadcast_to(room.light, p.shape)
    near, far = span(p, direction, *ball)
    lit, t = np.ones(p.shape[1], np.float32), np.maximum(near, 0.015)
    t += 0.08 * noise(p[0] * 331 + p[1] * 173, p[2] * 317)  # grain instead of rings
    rows = np.flatnonzero(near < far)
    for _ in range(40):
        if not len(rows):
            break
        gap = distance(p[:, rows] + room.light * t[rows])
        lit[rows] = np.minimum(lit[rows], np.clip(gap * room.softness / t[rows], 0, 1))
        t[rows] += np.clip(gap, 0.012, 0.15)
        rows = rows[(lit[rows] > 0.01) & (t[rows] < far[rows])]
    return lit * lit * (3 - 2 * lit)


def render(parts: list[Part], radius: float, tall: float, random: Random, side: int) -> Image.Image:
    """Photograph an object in a random room, from a random side."""
    room = Room.drawn(random)
    fine = 3 * side // 2  # reduced at the end, so that edges are smooth

    def distance(p: Array) -> Array:
        found = parts[0].distance(p)
        for part in parts[1:]:
            found = np.minimum(found, part.distance(p))
        return found

    centre = np.array([[0], [tall / 2], [0]], np.float32)
    reach = float(np.hypot(radius, tall / 2)) * 1.12
    around, up = random.uniform(0, 2 * np.pi), random.uniform(0.12, 0.8)
    away = reach / np.sin(0.27) * random.uniform(0.85, 1.45)
    back = np.array([np.cos(around) * np.cos(up), np.sin(up), np.sin(around) * np.cos(up)])
    aim = centre[:, 0] + random.normal(0, 0.08, 3)
    origin = (aim + away * back).astype(np.float32)[:, None]
    right = np.cross((0, 1, 0), back)
    right /= np.linalg.norm(right)
    grid = (np.arange(fine, dtype=np.float32) + 0.5) / fine * 2 - 1
    x, y = (each.ravel() * np.float32(np.tan(0.27)) for each in np.meshgrid(grid, -grid))
    above = np.cross(back, right)
    d = np.stack([right[i] * x + above[i] * y - back[i] for i in range(3)]).astype(np.float32)
    d /= length(*d)

    ball = centre, reach
    hit = march(distance, origin, d, *span(origin, d, *ball))
    floor = np.where(d[1] < -1e-3, -origin[1] / np.minimum(d[1], -1e-3), np.inf).astype(np.float32)
    rows = np.flatnonzero((hit < floor) & np.isfinite(hit))
    floor[rows] = np.inf
    colour = _background(distance, room, origin, d, floor, ball)
    colour[:, rows] = _object(
        parts, distance, room, origin + d[:, rows] * hit[rows], d[:, rows], ball
    )

    colour *= np.float32(random.uniform(0.55, 1.1)) * (1 + random.normal(0, 0.03, (3, 1)))
    colour *= 1 - 0.16 * (x * x + y * y) / np.tan(0.27) ** 2  # a lens is darker at its corners
    mapped = colour * (2.51 * colour + 0.03) / (colour * (2.43 * colour + 0.59) + 0.14)
    values = np.clip(mapped, 0, 1).T.reshape(fine, fine, 3) ** (1 / 2.2)
    values += random.normal(0, 0.012, (fine, fine, 1))  # the grain of a sensor
    picture = Image.fromarray((np.clip(values, 0, 1) * 255).astype(np.uint8))
    return picture.resize((side, side), Image.Resampling.LANCZOS)


def _background(
    distance: Distance, room: Room, origin: Array, d: Array, floor: Array, ball: tuple[Array, float]
) -> Array:
    """Return the table, with the object's shadow, and the wall behind it, out of focus."""
    rows = np.flatnonzero(np.isfinite(floor))
    p = origin + d[:, rows] * floor[rows]
    p[1] = 0
    away = length(p[0], p[2])
    lit = np.ones(len(rows), np.float32)
    near = np.flatnonzero(away < 6 * ball[1])
    lit[near] = shadow(distance, p[:, near], room, ball)
    close = np.flatnonzero(away < 1.6 * ball[1])
    open_ = np.ones(len(rows), np.float32)
    for height in (0.05, 0.16, 0.4):
        up = p[:, close] + np.array([[0], [height], [0]], np.float32)
        open_[close] -= np.clip(height - distance(up), 0, None) / height * 0.24
    base = room.table_colour(p[0], p[2])
    shade = base * (room.warm * 1.25 * lit * room.light[1] + 0.42 * open_)
    wall = room.wall * (0.62 + 0.9 * d[1] + 0.25 * (noise(d[0] * 3 + 9, d[1] * 3) - 0.5))
    colour = np.maximum(wall, 0.02)
    far = _step(away - 4.2 * ball[1], 1.6 * ball[1])
    colour[:, rows] = blend(far, shade, colour[:, rows])
    return colour


def _object(
    parts: list[Part], distance: Distance, room: Room, p: Array, d: Array, ball: tuple[Array, float]
) -> Array:
    """Return the colours of points on the object: window, room, and both mirrored in the glaze."""
    corners = np.array([[1, -1, -1], [-1, -1, 1], [-1, 1, -1], [1, 1, 1]], np.float32)
    n = sum(corner[:, None] * distance(p + 1.2e-3 * corner[:, None]) for corner in corners)
    n /= length(*n) + 1e-9
    which = np.argmin([part.distance(p) for part in parts], axis=0)
    base, gloss, glow = np.empty_like(p), np.empty_like(p[0]), np.empty_like(p[0])
    for number, part in enumerate(parts):
        rows = np.flatnonzero(which == number)
        base[:, rows], gloss[rows], glow[rows] = part.paint(p[:, rows]), part.gloss, part.glow
    lit = shadow(distance, p + 6e-3 * n, room, ball)
    open_ = np.ones_like(lit)
    for reach, weight in ((0.05, 0.35), (0.14, 0.3), (0.3, 0.3)):
        tip = p + reach * n
        gap = np.minimum(distance(tip), np.maximum(tip[1], 0))
        open_ -= weight * np.clip(reach - gap, 0, None) / reach
    open_ = np.clip(open_, 0.05, 1)
    facing = np.maximum((n * room.light).sum(0), 0)
    sky = 0.5 + 0.5 * n[1]
    ambient = open_ * (0.22 * room.wall + 0.38) * sky + 0.35 * open_ * room.table * (1 - sky)
    colour = base * (1.35 * room.warm * facing * lit + ambient)
    cosine = np.clip(-(n * d).sum(0), 0, 1)
    mirrored = d + 2 * cosine * n
    fresnel = (0.04 + 0.96 * (1 - cosine) ** 5 * 0.7) * np.minimum(gloss, 1.6)
    colour += fresnel * room.seen(mirrored) * open_ * (0.25 + 0.75 * np.maximum(lit, 0.3))
    return colour + base * glow * np.array([[1.0], [0.82], [0.55]], np.float32) * 1.6


def main() -> None:
    """Write FOLDER/CLASS/NN.jpg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--views", type=int, default=12, help="pictures of each class")
    parser.add_argument("--size", type=int, default=256, help="side of a picture in pixels")
    parser.add_argument("--classes", type=int, help="the first N classes only")
    options = parser.parse_args()
    every = list(classes(np.random.default_rng(3)))
    for number, (name, family, style) in enumerate(every[: options.classes]):
        print(name, flush=True)
        build, radius, tall = FAMILIES[family]
        place = options.folder / name
        place.mkdir(parents=True, exist_ok=True)
        parts = build(style)
        for view in range(options.views):
            random = np.random.default_rng((number, view))
            picture = render(parts, radius, tall, random, options.size)
            picture.save(place / f"{view + 1:02}.jpg", quality=92)


if __name__ == "__main__":
    main()
