"""Near duplicates: pictures that differ by size, compression or a touch of colour only.

Two looks at each picture. A 64-bit difference hash (is a pixel of the 9 × 8 thumbnail brighter
than its right neighbour?) finds candidates; a 16 × 16 thumbnail of each, standardised, confirms
them. Exact copies share a hash, so groups of equal hashes count as one from the start.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

BITS = 8
"""Candidates differ in at most so many bits of 64."""
LIKENESS = 0.95
"""Duplicates have thumbnails that correlate by at least this."""
SIDE = 16

Look = tuple[NDArray[np.bool_], NDArray[np.float32]]


def look_at(image: Image.Image) -> Look:
    """The difference hash (64,) and the standardised thumbnail (256,) of a picture."""
    gray = image.convert("L")
    small = np.asarray(gray.resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    thumbnail = np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32)
    thumbnail = thumbnail.reshape(-1) - thumbnail.mean()
    length = float(np.linalg.norm(thumbnail))
    bits = (small[:, :-1] > small[:, 1:]).reshape(-1)
    return bits, thumbnail / length if length else thumbnail


def near_duplicates(bits: NDArray[np.bool_], thumbnails: NDArray[np.float32]) -> list[list[int]]:
    """Groups of two or more items (N, 64), (N, 256) that look alike, directly or in a chain."""
    parent = list(range(len(bits)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in _pairs(bits):
        if root(i) != root(j) and float(thumbnails[i] @ thumbnails[j]) >= LIKENESS:
            parent[root(j)] = root(i)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i in range(len(bits)):
        groups[root(i)].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _pairs(bits: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Pairs whose hashes are close: those of one hash in a chain, then different hashes.

    The number of differing bits of all pairs is one matrix product, (64 − a·b) / 2 over ±1.
    """
    hashes, which = np.unique(bits, axis=0, return_inverse=True)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for i, h in enumerate(which.reshape(-1).tolist()):
        members[h].append(i)
    for same in members.values():
        yield from pairwise(same)
    signs: Tensor = torch.from_numpy(hashes).float() * 2 - 1  # (H, 64)
    for start in range(0, len(signs), 1024):
        agreement = signs[start : start + 1024] @ signs[start:].T
        close = (agreement >= hashes.shape[1] - 2 * BITS).nonzero().tolist()
        for a, b in close:
            if a < b:
                yield members[start + a][0], members[start + b][0]
