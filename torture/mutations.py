"""Change bytes as no honest program would: a few small changes to something well-formed."""

import re
import struct
from collections.abc import Sequence
from random import Random

NUMBERS = (
    *(0, 1, 2, 7, 127, 128, 255, 256, 32_767, 65_535, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -512),
)
DIGITS = re.compile(rb"[0-9]{1,12}(?![0-9])")
COUNTS = (1, 1, 1, 2, 2, 3, 5, 9)
"""Changes of one case, one of these."""
LONGEST = 2**20
"""Bytes of one case; larger ones are cut."""


def mutated(draw: Random, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Return one of the seeds with some changes; words: what this format is made of."""
    content = bytearray(draw.choice(seeds))
    for _ in range(draw.choice(COUNTS)):
        draw.choice(_CHANGES)(draw, content, seeds, words)
    return bytes(content[:LONGEST])


def _place(draw: Random, content: bytearray) -> int:
    """Return a place; half of them near the start, where formats describe what follows."""
    end = min(len(content), 512) if draw.random() < 0.5 else len(content)
    return draw.randrange(end) if end else 0


def _flip(draw: Random, content: bytearray, *_: object) -> None:
    if content:
        content[_place(draw, content)] ^= 1 << draw.randrange(8)


def _set(draw: Random, content: bytearray, *_: object) -> None:
    if content:
        content[_place(draw, content)] = draw.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF, 0x0A, 0x2F))


def _cut(draw: Random, content: bytearray, *_: object) -> None:
    at = _place(draw, content)
    del content[at : at + draw.choice((1, 2, 4, 16, 64, 512))]


def _truncate(draw: Random, content: bytearray, *_: object) -> None:
    if draw.random() < 0.3:
        del content[_place(draw, content) :]


def _repeat(draw: Random, content: bytearray, *_: object) -> None:
    at = _place(draw, content)
    piece = content[at : at + draw.choice((1, 4, 16, 512, 4096))]
    content[at:at] = piece * draw.choice((1, 1, 2, 20))


def _insert(draw: Random, content: bytearray, *_: object) -> None:
    at = _place(draw, content)
    content[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8, 40)))


def _number(draw: Random, content: bytearray, *_: object) -> None:
    """Overwrite a binary number."""
    at, form = _place(draw, content), draw.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(form)
    content[at : at + size] = struct.pack(form, draw.choice(NUMBERS) % 2 ** (8 * size))


def _written_number(draw: Random, content: bytearray, *_: object) -> None:
    """Replace a number that is written in digits."""
    found = list(DIGITS.finditer(content, 0, 4096))
    if found:
        start, end = draw.choice(found).span()
        texts = (*map(str, NUMBERS), "NaN", "1e999", "-0", "9" * 400, "0.5", "null", '"x"', "[]")
        content[start:end] = draw.choice(texts).encode()


def _word(draw: Random, content: bytearray, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    if words:
        at = _place(draw, content)
        content[at : at + draw.choice((0, 0, 1, 8))] = draw.choice(words)


def _splice(
    draw: Random, content: bytearray, seeds: Sequence[bytes], words: Sequence[bytes]
) -> None:
    """Put a piece of another seed in."""
    other = draw.choice(seeds)
    if other:
        start, at = draw.randrange(len(other)), _place(draw, content)
        piece = other[start : start + draw.choice((8, 64, 512, 4096))]
        content[at : at + draw.choice((0, len(piece)))] = piece


_CHANGES = (
    *(_flip, _set, _cut, _truncate, _repeat, _insert),
    *(_number, _number, _written_number, _written_number, _word, _word, _splice),
)
