"""What the page searches: the index of a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nofuss.data.open import open_data
from nofuss.search.plane import lay_out
from nofuss.search.shelf import open_shelf
from nofuss.search.update import update_index
from tests.search.verdicts import open_set
from tests.tiny_run import draw


def test_what_was_added_is_found_beside_what_was_trained(picture_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(picture_run, run)
    (tmp_path / "new" / "class").mkdir(parents=True)
    draw(1, 50).save(tmp_path / "new" / "class" / "a.png")
    draw(1, 51, side=500).save(tmp_path / "new" / "class" / "b.png")
    update_index(run, tmp_path / "new")
    shelf = open_shelf(run)
    assert "class" in shelf.classes
    assert len(shelf.classes) > 1
    assert shelf.pictures is not None
    files = [tmp_path / "new" / "class" / name for name in ("a.png", "b.png")]
    assert [shelf.picture(name) for name in shelf.own.names[-2:]] == files  # decoded elsewhere
    found = shelf.search(shelf.encoder.embed([draw(1, 50)])[0], 1)
    assert [hit.name for hit in found.hits] == [str(files[0])]


def test_arrays_are_shown_too(tmp_path: Path, picture_run: Path) -> None:
    """An index of pictures in a file of arrays: drawn from the array."""
    images = np.stack([np.asarray(draw(label, 3)) for label in range(4)])
    np.savez(tmp_path / "images.npz", images=images, labels=np.array([0, 0, 1, 1]))
    assert open_data(tmp_path / "images.npz").kind == "images"
    run = tmp_path / "run"
    shutil.copytree(picture_run, run)
    update_index(run, tmp_path / "images.npz")
    shelf = open_shelf(run)
    assert shelf.pictures is not None
    for row in range(4):
        shown = shelf.picture(f"{tmp_path}/images.npz#{row}")
        assert shown is not None
        assert (np.asarray(shown) == images[row]).all()


def test_beyond_the_threshold_there_is_nothing(picture_run: Path) -> None:
    shelf = open_shelf(picture_run)
    index = shelf.own
    assert shelf.search(index.vectors[0], 1).found is None  # too few classes were held out
    assert shelf.threshold is None
    index.about = index.about._replace(open_set=open_set())
    nearest = shelf.search(index.vectors[0], 1)
    assert nearest.hits[0].distance == pytest.approx(0, abs=1e-6)
    assert (nearest.match, nearest.found) == ("good", True)
    opposite = shelf.search(-index.vectors.mean(0), 1)
    assert (opposite.match, opposite.found) == ("nothing", False)
    assert shelf.threshold == open_set().distance
    of_class = shelf.search(-index.vectors.mean(0), 1, only=[0])
    assert of_class.match == "unknown"  # the verdict is about all classes


def test_what_is_on_the_map_stays_in_its_place() -> None:
    x = torch.nn.functional.normalize(
        torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    )
    plane = lay_out(x[:40], x[40:])
    np.testing.assert_allclose(plane.place(x), plane.places, atol=1e-3)
    between = torch.nn.functional.normalize(x[:1] + 1e-3 * x[1:2])
    np.testing.assert_allclose(plane.place(between)[0], plane.places[0], atol=1e-2)
