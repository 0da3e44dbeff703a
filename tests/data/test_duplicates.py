"""Copies: equal digests, and pictures that look the same; in memory that does not grow with N²."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ImageEnhance, ImageFilter

from nofuss.data import duplicates
from nofuss.data.duplicates import (
    exact_copies,
    group_alike,
    look_at,
    near_duplicates,
)
from tests.tiny_run import scene


def test_exact_copies_by_hand() -> None:
    keys = [b"a", b"b", b"", b"a", b"", b"c", b"b", b"a"]
    assert exact_copies(keys) == [[0, 3, 7], [1, 6]]
    assert exact_copies([]) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image,
        lambda image: image.resize((70, 80)),
        lambda image: image.filter(ImageFilter.GaussianBlur(1)),
        lambda image: ImageEnhance.Brightness(image).enhance(1.2),
        lambda image: image.convert("L"),
    ],
)
def test_changed_pictures_are_near_duplicates(change: object) -> None:
    pictures = [scene(1), scene(2), change(scene(1)), scene(3)]  # type: ignore[operator]
    looks = [b"", *map(look_at, pictures)]
    assert near_duplicates(looks) == [[1, 3]]


def test_scenes_are_no_duplicates_of_each_other() -> None:
    assert near_duplicates([look_at(scene(i, 64)) for i in range(300)]) == []
    assert near_duplicates([]) == []


def test_small_pictures_are_compared_by_content_alone() -> None:
    assert look_at(scene(1, 63)) == b""
    assert near_duplicates([look_at(scene(1, 63))] * 2) == []


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 1000), st.integers(2, 40), st.sampled_from([1, 3, 16, 512]))
def test_groups_are_those_of_a_slow_search(
    monkeypatch: pytest.MonkeyPatch, seed: int, n: int, block: int
) -> None:
    """Hashes a few bits apart with equal thumbnails: chains join by every pair that is close."""
    monkeypatch.setattr(duplicates, "BLOCK", block)
    random = np.random.default_rng(seed)
    bits = np.repeat(random.random((n // 4 + 1, 64)) < 0.5, 4, axis=0)[:n]
    bits ^= random.random(bits.shape) < 0.06
    thumbnails = np.ones((n, 4), dtype=np.float32) / 2
    group = list(range(n))
    for i in range(n):
        for j in range(i):
            if (bits[i] != bits[j]).sum() <= 8:
                old, new = group[i], group[j]
                group = [new if g == old else g for g in group]
    expected = {frozenset(i for i in range(n) if group[i] == g) for g in group}
    found = {frozenset(rows) for rows in group_alike(bits, thumbnails)}
    assert found == {rows for rows in expected if len(rows) > 1}
