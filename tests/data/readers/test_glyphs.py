"""The built-in characters."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.data.readers import glyphs
from nofuss.data.split import split_collection

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of this module, so that rendering is done once."""
    return tmp_path_factory.mktemp("characters")


@pytest.fixture
def characters(home: Path, monkeypatch: pytest.MonkeyPatch) -> Collection:
    monkeypatch.setenv("NOFUSS_CACHE", str(home))
    return open_data(None)


def test_the_counts_in_the_docstring_are_true(characters: Collection) -> None:
    train, test = split_collection(characters)
    said = glyphs.__doc__.split()
    faces = Counter(Counter(characters.labels.tolist()).values())
    for number in (1446, 19581, 540, 863, 723, len(train), len(test)):
        assert f"{number:,}" in {word.strip("(),:;") for word in said}
    assert (characters.num_classes, len(characters)) == (1446, 19581)
    assert (faces[16], faces[12]) == (540, 863)
    assert (min(faces), max(faces)) == (12, 16)


def test_homoglyphs_are_one_class_and_lookalikes_are_not(characters: Collection) -> None:
    names = set(characters.class_names)
    assert "A" in names
    assert not names & set("ΑАΒВΕЕΟОΡРсе")  # Greek and Cyrillic twins of Latin letters
    assert set("0OoIl1ÀÁÄaα") <= names


def test_pictures_have_ink_and_no_class_holds_many_copies(characters: Collection) -> None:
    images = characters.array
    assert images.shape[1:] == (28, 28)
    assert (images.reshape(len(images), -1).max(axis=1) > 100).all()
    seen = set(zip(characters.labels.tolist(), map(bytes, images), strict=True))
    assert len(images) - len(seen) == 51


def test_raw_pixels_find_about_half(characters: Collection) -> None:
    test = characters.subset(split_collection(characters)[1])
    pixels = test.array.reshape(len(test), -1).astype(np.float32)
    queries = np.arange(0, len(test), 5)
    index = NearestNeighbors(n_neighbors=2, algorithm="brute").fit(pixels)
    nearest = index.kneighbors(pixels[queries], return_distance=False)
    other = np.where(nearest[:, 0] == queries, nearest[:, 1], nearest[:, 0])
    assert 0.48 < (test.labels[other] == test.labels[queries]).mean() < 0.55


def test_the_cache_is_used_and_a_damaged_one_made_again(
    characters: Collection, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = home.glob("characters-*.sqlite")
    whole = file.read_bytes()
    assert open_data(None).fingerprint() == characters.fingerprint()
    assert file.read_bytes() == whole
    half = len(whole) // 2
    file.write_bytes(whole[:half] + bytes(99) + whole[half + 99 :])
    assert open_data(None).fingerprint() == characters.fingerprint()
    assert re.search(r"characters-\w+.sqlite is damaged", caplog.text)
    assert open_data(None).fingerprint() == characters.fingerprint()
