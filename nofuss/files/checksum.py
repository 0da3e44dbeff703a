"""Checksums, in two kinds: SHA-256 beside what is stored, BLAKE2b for keys and for comparing.

A SHA-256 is written with a file and compared when it is read back. A BLAKE2b digest of 16 bytes
names a file of the cache after everything that its content depends on, and finds files that are
copies of each other. Both find damage and differences; neither is a signature.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Bytes = bytes | memoryview
KEY_SIZE = 16
"""Bytes of a BLAKE2b digest: of 2³² different files, two share one with a chance of 2⁻⁶⁵."""


def sha256_of(parts: Iterable[Bytes]) -> str:
    """Return the SHA-256 of the parts, one after the other."""
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


def digest_of(parts: Iterable[Bytes], *, size: int = KEY_SIZE) -> str:
    """Return the BLAKE2b digest of the parts, one after the other."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sha256_of_file(file: IO[bytes]) -> str:
    """Return the SHA-256 of the rest of an open file, without holding it in memory."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array's values in order, without a copy where they lie in order."""
    return np.ascontiguousarray(array).data


def tensor_parts(tensors: Mapping[str, "Tensor"]) -> Iterator[Bytes]:
    """Return names and values of tensors, as keys of the cache contain them."""
    for name, tensor in tensors.items():
        yield name.encode()
        yield array_bytes(tensor.detach().cpu().numpy())
