"""Small pictures on disk, and a cache directory that is each test's own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Draw = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(cache: Path) -> Path:
    return cache


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Write a picture of random pixels below tmp_path; the same seed draws the same pixels."""

    def write(name: str, seed: int = 0, size: tuple[int, int] = (12, 9), **options: object) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, **options)
        return file

    return write


@pytest.fixture
def photos(tmp_path: Path, draw: Draw) -> Path:
    """Three classes of three pictures, no two alike or of the same size."""
    for c, name in enumerate(("robin", "tit", "wren")):
        for i in range(3):
            draw(f"photos/{name}/{i}.png", seed=10 * c + i, size=(20 + i, 16 + 2 * c))
    return tmp_path / "photos"
