"""Read the headers of a tar file as if a stranger had made it: in one pass, in little memory.

POSIX (ustar, pax) and GNU headers, as far as WebDataset shards need them: name, size, place, and
whether it is a plain file. Python's tarfile was not written for hostile bytes: up to 3.11 it needs
hours for a header of a megabyte of digits, recurses once for each long name in a row, copies every
global attribute for each member, and ends in an IndexError where a sparse map is cut off. This
reader takes less than half of its time on honest shards.
"""

import io
from collections.abc import Iterator
from typing import IO, NamedTuple

BLOCK = 512
LARGEST_HEADER = 2**20
"""Bytes of a long name, or of the attributes of a member."""
_REGULAR, _FOLDER = (b"0", b"\0", b"7"), b"5"
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")
_LONG_NAME, _LONG_LINK, _ATTRIBUTES, _GLOBAL, _SPARSE = b"L", b"K", (b"x", b"X"), b"g", b"S"


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    start: int
    """Its first byte in the tar file."""
    size: int
    is_regular: bool
    """Neither a link nor a folder, a device, a pipe or a sparse file."""
    is_folder: bool = False


class _Attributes(NamedTuple):
    """What headers in front of a member say about it."""

    name: bytes | None = None
    size: int | None = None
    is_sparse: bool = False


def read_members(file: IO[bytes]) -> Iterator[Member]:
    """Yield the members of an opened tar file; ValueError where it is none, or is cut off."""
    end, at, given = file.seek(0, io.SEEK_END), 0, _Attributes()
    while at < end:
        file.seek(at)
        header = file.read(BLOCK)
        if header.count(0) == BLOCK:  # the mark of the end
            return
        if len(header) < BLOCK or not _is_sound(header):
            raise ValueError(f"no header of a member at byte {at:,}")
        kind, size = header[156:157], _number(header[124:136])
        at += BLOCK
        if kind == _LONG_NAME or kind in _ATTRIBUTES:
            given = _with(given, kind, _content(file, size))
        elif kind not in (_LONG_LINK, _GLOBAL):
            if kind == _SPARSE:
                at += _extensions(file, header)
            size = size if given.size is None else given.size
            name = _name(header) if given.name is None else given.name
            size = 0 if kind in _WITHOUT_CONTENT else size
            is_folder = kind == _FOLDER or (kind == b"\0" and name.endswith(b"/"))
            is_regular = kind in _REGULAR and not given.is_sparse and not is_folder
            if at + size > end:
                raise ValueError(f"it ends in the middle of {name.decode('utf-8', 'replace')}")
            yield Member(
                name.decode("utf-8", "surrogateescape").rstrip("/"), at, size, is_regular, is_folder
            )
            given = _Attributes()
        at += -(-size // BLOCK) * BLOCK


def _is_sound(header: bytes) -> bool:
    """Return whether the header has its checksum; some programs add signed bytes."""
    counted = header[:148] + b" " * 8 + header[156:]
    try:
        expected = _number(header[148:156])
    except ValueError:
        return False
    total = sum(counted)
    return expected == total or expected == total - 256 * sum(byte > 127 for byte in counted)


def _number(field: bytes) -> int:
    """Return a number in octal digits, or in binary with the highest bit set."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise ValueError("a negative size")
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0")[0].strip()
    if not all(0x30 <= digit <= 0x37 for digit in digits):
        raise ValueError(f"{digits!r} is not a number")
    return int(digits or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0")[0]
    prefix = header[345:500].split(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _content(file: IO[bytes], size: int) -> bytes:
    """Return the content of a header that describes the next member."""
    if size > LARGEST_HEADER:
        raise ValueError(f"a header of {size:,} bytes")
    content = file.read(size)
    if len(content) < size:
        raise ValueError("it ends in the middle of a header")
    return content


def _with(given: _Attributes, kind: bytes, content: bytes) -> _Attributes:
    """Return the attributes with those of a further header."""
    if kind == _LONG_NAME:
        return given._replace(name=content.split(b"\0")[0])
    at = 0
    while at < len(content) and content[at]:  # records "LENGTH KEY=VALUE\n"
        digits, space, _ = content[at : at + 9].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = content[at + len(digits) + 1 : at + length]
        key, sign, value = record.partition(b"=")
        if not sign or not record.endswith(b"\n"):
            raise ValueError("attributes that can't be read")
        at, value = at + length, value[:-1]
        if key == b"path":
            given = given._replace(name=value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError(f"the size {value[:20]!r}")
            given = given._replace(size=int(value))
        elif key.startswith(b"GNU.sparse."):
            given = given._replace(is_sparse=True)
    return given


def _extensions(file: IO[bytes], header: bytes) -> int:
    """Return the bytes of further maps of a sparse file, which are behind its header."""
    size, is_extended = 0, header[482]
    while is_extended:
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise ValueError("it ends in the middle of a sparse file")
        size, is_extended = size + BLOCK, block[504]
    return size
