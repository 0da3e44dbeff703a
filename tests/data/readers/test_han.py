"""The optional set of Han and Hangul characters, and the drawing that both sets share."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest

from nofuss.cli import main
from nofuss.data.collection import TEST, TRAIN
from nofuss.data.open import open_data
from nofuss.data.readers import han
from nofuss.data.readers.glyphs import Arrays, draw
from nofuss.errors import DataError

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
NAMES = ("Sans", "Sans-Bold", "Sans-Oblique", "Serif", "Serif-Bold", "Serif-Italic", "SansMono")
FACES = [FONTS / f"DejaVu{name}.ttf" for name in NAMES]
LETTERS = (range(0x41, 0x5B), range(0x61, 0x7B), range(0x3B1, 0x3CA))
SMALL = han.Shape({TRAIN: 30, TEST: 25}, {TRAIN: 120, TEST: 100}, spare=1.3)


def fonts_missing() -> str:
    try:
        han.font_files()
    except DataError as error:
        return str(error)
    return ""


with_fonts = pytest.mark.skipif(bool(fonts_missing()), reason=fonts_missing())


@pytest.fixture(scope="module")
def letters() -> Arrays:
    return han.render(FACES, blocks=LETTERS, shape=SMALL)


def test_sides_have_the_asked_classes_and_pictures(letters: Arrays) -> None:
    for side in (TRAIN, TEST):
        rows = letters["split"] == side
        assert rows.sum() == SMALL.pictures[side]
        assert len(np.unique(letters["labels"][rows])) == SMALL.classes[side]
    assert len(letters["codes"]) == 55
    assert np.bincount(letters["labels"]).min() >= han.FEWEST_KEPT


def test_no_class_is_on_both_sides(letters: Arrays) -> None:
    sides = [set(letters["labels"][letters["split"] == side].tolist()) for side in (TRAIN, TEST)]
    assert not sides[0] & sides[1]


def test_the_same_seed_draws_the_same(letters: Arrays) -> None:
    again = han.render(FACES, blocks=LETTERS, shape=SMALL)
    other = han.render(FACES, blocks=LETTERS, shape=SMALL, seed=1)
    assert all(np.array_equal(letters[key], again[key]) for key in letters)
    assert not np.array_equal(letters["codes"], other["codes"])


def test_no_two_pictures_of_a_character_are_alike(letters: Arrays) -> None:
    for label in range(len(letters["codes"])):
        x = letters["images"][letters["labels"] == label].reshape(-1, han.SIDE**2).astype(float)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        cosines = x @ x.T - np.eye(len(x))
        assert cosines.max() <= han.ALIKE + 1e-6


def test_homoglyphs_are_left_out() -> None:
    """Latin A and Greek Alpha are drawn by one glyph; the lower code stays, in every face."""
    codes = np.array([*map(ord, "AEαΑΒΕ")])
    drawn = [draw(file, codes.tolist(), side=28, size=20) for file in FACES[:2]]
    for usable in han.distinct([codes, codes], drawn):
        assert usable.tolist() == [True, True, True, False, True, False]


def test_a_face_that_renders_alike_adds_nothing() -> None:
    codes = np.arange(0x41, 0x5B)
    twice = [draw(FACES[0], codes.tolist(), side=28, size=20)] * 2
    first, second = han.distinct([codes, codes], twice)
    assert first.all()
    assert not second.any()


def test_too_few_characters_are_refused() -> None:
    with pytest.raises(DataError, match=r"26 .* 11,318"):
        han.render(FACES, blocks=(range(0x41, 0x5B),))


def test_missing_typefaces_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(han.FACES, "NoSuchFace.ttf", "fonts-no-such-face")
    assert main(["doctor", "han"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "apt-get install" in line
    assert "fonts-no-such-face" in line
    assert not list(tmp_path.iterdir())


@with_fonts
def test_the_packages_draw_han_and_hangul() -> None:
    blocks = (range(0x4E00, 0x4EC8), range(0xAC00, 0xACC8))
    drawn = han.render(han.font_files(), blocks=blocks, shape=SMALL)
    names = {chr(code) for code in drawn["codes"]}
    assert any(name < "\ua000" for name in names)
    assert any(name > "\uac00" for name in names)
    assert (drawn["images"].reshape(220, -1).max(axis=1) > 100).all()


@with_fonts
@pytest.mark.slow
def test_the_whole_set_has_the_shape_of_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole = open_data("han")
    sizes = [
        ((whole.split == side).sum(), len(set(whole.labels[whole.split == side])))
        for side in (TRAIN, TEST)
    ]
    assert sizes == [(59_551, 11_318), (60_502, 11_316)]
    assert open_data("han").fingerprint() == whole.fingerprint(), "from the cache"
