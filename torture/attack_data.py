"""Shards that a stranger made: `nofuss doctor` and `nofuss train` refuse each, or open it."""

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from torture.forked import run_forked
from torture.measured import Case, judged
from torture.training import FLAGS

SECONDS, MEGABYTES = 30.0, 1000.0
"""Most that a command may take; torch alone has more than 300 MB."""


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run both commands on each bomb."""
    for name, content in shards().items():
        for command in ("doctor", "train"):
            place = home / "data"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            (place / "x.tar").write_bytes(content)
            words: list[object] = [command, place / "x.tar"]
            if command == "train":
                words += ["--out", place / "run", *FLAGS, "--epochs", "1"]
            ended = run_forked(home, *words)
            costs = [(ended.seconds, SECONDS, "s"), (ended.megabytes, MEGABYTES, "MB")]
            others = [f"took {spent:.0f} {unit}" for spent, most, unit in costs if spent > most]
            yield judged(f"{name}, {command}", ended, *others)


def picture() -> bytes:
    """Return a small picture."""
    with io.BytesIO() as file:
        Image.new("L", (16, 16), 99).save(file, "PNG")
        return file.getvalue()


def header(name: str, size: int, kind: bytes = b"0", *, raw: bytes | None = None) -> bytes:
    """Return the header of a member; raw: the field of its size as it is written."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"%011o\0" % size if raw is None else raw
    block[156:157] = kind
    return summed(block)


def summed(block: bytearray) -> bytes:
    """Return a header with its checksum."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    """Return content up to a whole number of blocks."""
    return content + bytes(-len(content) % 512)


def _extended() -> bytes:
    block = bytearray(header("a/1.png", 10, b"S"))
    block[482] = 1
    return summed(block)


def shards() -> dict[str, bytes]:
    """Return shards by name."""
    one = header("a/1.png", 0)
    member = header("a/9.png", len(picture())) + padded(picture())
    return {
        "a size below zero": header("a/1.png", 0, raw=b"\xff" * 12) + one,
        "a size that leads back": header("a/1.png", 0, raw=b"\xff" * 10 + b"\xfc\0") + one,
        "a size of exabytes": header("a/1.png", 0, raw=b"\x80" + b"\x7f" * 11) + one,
        "a sparse map that is cut off": _extended(),
        "5,000 long names in a row": (header("x", 512, b"L") + padded(b"n" * 500)) * 5_000 + one,
        "names that lead elsewhere": header("../../9.png", len(picture()))
        + padded(picture())
        + header("/etc/passwd.png", 0)
        + header("../../../etc/x.png", 0, b"2"),
        "control characters": header("a\x1b]0;x\x07/1\n.png", 0) + member,
    }
