"""Change bytes as no honest program would: a few small changes to something well-formed."""

import re
import struct
from collections.abc import Sequence
from random import Random

NUMBERS = (0, 1, 2, 127, 255, 256, 65_535, 2**24, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1, -1)
DIGITS = re.compile(rb"[0-9]{1,12}(?![0-9])")
WRITTEN = (*(str(n) for n in NUMBERS), "NaN", "1e999", "-0", "9" * 400, "0.5", "null", '"x"', "[]")
LONGEST = 2**20
"""Bytes of one case; larger ones are cut."""


def mutated(draw: Random, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Return one of the seeds with some changes; words: what this format is made of."""
    content = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5, 9))):
        # Half of the places are near the start, where formats describe what follows.
        end = min(len(content), 512) if draw.random() < 0.5 else len(content)
        at = draw.randrange(end) if end else 0
        match draw.randrange(8):
            case 0 if content:
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                del content[at : at + draw.choice((1, 2, 4, 16, 512))]
            case 2:
                piece = content[at : at + draw.choice((1, 4, 16, 512, 4096))]
                content[at:at] = piece * draw.choice((1, 1, 2, 20))
            case 3:
                content[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8, 40)))
            case 4:  # a binary number
                form = draw.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
                size = struct.calcsize(form)
                number = draw.choice(NUMBERS) % 2 ** (8 * size)
                content[at : at + size] = struct.pack(form, number)
            case 5:  # a number that is written in digits
                if found := list(DIGITS.finditer(content, 0, 4096)):
                    start, end = draw.choice(found).span()
                    content[start:end] = draw.choice(WRITTEN).encode()
            case 6 if words:
                content[at : at + draw.choice((0, 0, 1, 8))] = draw.choice(words)
            case _ if other := draw.choice(seeds):  # a piece of another seed
                start = draw.randrange(len(other))
                content[at:at] = other[start : start + draw.choice((8, 64, 512, 4096))]
    return bytes(content[:LONGEST])
