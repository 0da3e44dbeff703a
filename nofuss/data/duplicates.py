"""Copies: items with the same content, and pictures that look the same.

Exact copies have equal digests. Near duplicates differ by size, compression or a touch of colour
only. They are found in two steps: a 64-bit difference hash (is a pixel of the 9 × 8 thumbnail
brighter than its right neighbour?) finds candidates, and the correlation of their standardised
16 × 16 thumbnails confirms them. Pictures with equal hashes are compared as one. Pictures of less
than 64 pixels are compared by content alone: at that size different characters look alike.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

BITS = 8
"""Candidates differ in at most this many bits of 64."""
LIKENESS = 0.95
"""Near duplicates have thumbnails whose correlation is at least this."""
SIDE = 16
SMALLEST = 64
"""Pixels that both sides of a picture must have for it to be a near duplicate."""
BLOCK = 512
"""Hashes that are compared with as many others at once: memory does not grow with the square."""


def exact_copies(keys: Sequence[bytes]) -> list[list[int]]:
    """Return groups of two or more positions with the same digest; b"" is equal to nothing."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, content in enumerate(keys):
        if content:
            groups[content].append(i)
    return [group for group in groups.values() if len(group) > 1]


def look_at(image: Image.Image) -> bytes:
    """Return the difference hash and the gray thumbnail of a picture; b"" if it is too small."""
    if min(image.size) < SMALLEST:
        return b""
    gray = image.convert("L")
    small = np.asarray(gray.resize((9, 8), Image.Resampling.BOX))
    thumbnail = gray.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.packbits(small[:, :-1] > small[:, 1:]).tobytes() + thumbnail.tobytes()


def near_duplicates(looks: Sequence[bytes]) -> list[list[int]]:
    """Return groups of two or more pictures that look alike, directly or through others.

    looks: what `look_at` returned; a picture without is like no other.
    """
    rows = [i for i, look in enumerate(looks) if look]
    table = np.frombuffer(b"".join(looks), np.uint8).reshape(len(rows), 8 + SIDE**2)
    thumbnails = table[:, 8:].astype(np.float32)
    thumbnails -= thumbnails.mean(1, keepdims=True)
    lengths = np.linalg.norm(thumbnails, axis=1, keepdims=True)
    thumbnails /= np.where(lengths, lengths, 1)
    groups = group_alike(np.unpackbits(table[:, :8], axis=1).astype(bool), thumbnails)
    return [[rows[i] for i in group] for group in groups]


def group_alike(bits: NDArray[np.bool_], thumbnails: NDArray[np.float32]) -> list[list[int]]:
    """Return groups of near duplicates, given hashes (N, 64) and thumbnails of unit length."""
    from scipy.cluster.hierarchy import DisjointSet

    groups = DisjointSet(range(len(bits)))
    for i, j in _pairs(bits):
        if not groups.connected(i, j) and float(thumbnails[i] @ thumbnails[j]) >= LIKENESS:
            groups.merge(i, j)
    return sorted(sorted(group) for group in groups.subsets() if len(group) > 1)


def _pairs(bits: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield pairs whose hashes are close: neighbours in a chain of equal ones, then others."""
    hashes, which = np.unique(bits, axis=0, return_inverse=True)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, h in enumerate(which.reshape(-1).tolist()):
        members[h].append(i)
    for same in members.values():
        yield from pairwise(same)
    signs: Tensor = torch.from_numpy(hashes).float() * 2 - 1  # (H, 64) of ±1
    starts = range(0, len(signs), BLOCK)
    for a, b in combinations_with_replacement(starts, 2):
        # Over ±1, a·b is the number of equal bits minus that of different ones.
        agreement = signs[a : a + BLOCK] @ signs[b : b + BLOCK].T  # (BLOCK, BLOCK)
        is_close = agreement >= hashes.shape[1] - 2 * BITS
        for i, j in zip(*(axis.tolist() for axis in is_close.nonzero(as_tuple=True)), strict=True):
            if a + i < b + j:  # each pair once, and none with itself
                yield members[a + i][0], members[b + j][0]
