"""Checksums are those of hashlib over the same bytes: keys of the cache stay valid."""

import hashlib
import io

import numpy as np
import pytest
import torch

from nofuss.files.checksum import (
    array_bytes,
    digest_of,
    sha256_of,
    sha256_of_file,
    tensor_parts,
)


def test_parts_are_hashed_one_after_the_other() -> None:
    assert sha256_of([b"ab", b"", b"c"]) == hashlib.sha256(b"abc").hexdigest()
    assert digest_of([b"ab", b"c"]) == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert len(digest_of([], size=8)) == 16


def test_a_file_has_the_checksum_of_its_content() -> None:
    content = b"abc" * 100_000
    assert sha256_of_file(io.BytesIO(content)) == sha256_of([content])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_values_are_hashed_in_order_however_they_lie_in_memory(tensor: torch.Tensor) -> None:
    values = tensor.detach().contiguous().numpy()
    assert digest_of(tensor_parts({"w": tensor})) == digest_of([b"w", values.tobytes()])
    assert digest_of([array_bytes(values)]) == digest_of([np.array(values).tobytes()])
