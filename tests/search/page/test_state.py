"""What the page shows at one moment, and what follows from it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from nofuss.data.corrections import Correction
from nofuss.run.directory import Run
from nofuss.run.proxies import RunProxies
from nofuss.search.feedback import Feedback, Mark
from nofuss.search.page.map import lay_out
from nofuss.search.page.routes import address_of, name_of, query_of
from nofuss.search.page.state import Base, State, open_state
from nofuss.search.update import update_index
from nofuss.search.verdict import Query
from tests.tiny_run import draw


@pytest.fixture(scope="module")
def state(picture_run: Path) -> State:
    return open_state(Run.open(picture_run))


def test_arrays_are_shown_too(tmp_path: Path, picture_run: Path) -> None:
    """An index of pictures in a file of arrays: drawn from the array."""
    images = np.stack([np.asarray(draw(label, 3)) for label in range(4)])
    np.savez(tmp_path / "images.npz", images=images, labels=np.array([0, 0, 1, 1]))
    run = tmp_path / "run"
    shutil.copytree(picture_run, run)
    update_index(run, tmp_path / "images.npz")
    state = open_state(Run.open(run))
    for row in range(4):
        shown = state.picture(f"{tmp_path}/images.npz#{row}")
        assert shown is not None
        assert (np.asarray(shown) == images[row]).all()


def test_a_new_state_begins_with_nothing_that_was_derived(state: State) -> None:
    name = state.index.sample(1)[0]
    was = state.index.get([name])[0].label
    assert was is not None
    assert state.map is state.map
    other = "plain" if was != "plain" else "striped"
    said = Feedback((Mark(name, "x", True), Correction(name, was, other)))
    new = replace(state, feedback=said)
    assert new.version != state.version
    assert new.map["classes"] != state.map["classes"]
    assert new.index.get([name])[0].label == other
    assert state.index.get([name])[0].label == was, "the former one is as it was"
    assert new.base.plane is state.base.plane, (
        "where things lie does not follow from what people say"
    )


def test_an_address_gives_the_query_back(state: State) -> None:
    vector = state.encoder.embed([draw(2, 60)])[0]
    for far in (None, 0.0, 0.1237, 1.5):
        address = address_of(Query(vector, far), state.encoder)
        back = query_of(address, state.encoder)
        torch.testing.assert_close(back.vector, vector, atol=1e-3, rtol=0)
        assert back.far == (None if far is None else pytest.approx(far, abs=1e-3))
        assert name_of(address) == name_of(address_of(Query(vector), state.encoder))
    model, numbers, far = address.split(".")
    for wrong in (
        "",
        numbers,
        f"{model}.{numbers}",
        f"{'0' * 16}.{numbers}.{far}",
        f"{model}.{numbers[:-4]}.{far}",
        f"{model}.{'A' * len(numbers)}.{far}",  # zeros
        f"{model}.{('fHx8' * len(numbers))[: len(numbers)]}.{far}",  # NaN
        f"{model}.{numbers}.nan",
        f"{model}.{numbers}.-100",
        f"{model}.<b>.{far}",
    ):
        with pytest.raises(HTTPException, match="made by another model"):
            query_of(wrong, state.encoder)


def test_stars_have_names_where_each_class_has_its_proxy(state: State) -> None:
    classes, named = state.encoder.class_names, list[str]()
    proxies = np.eye(len(classes), state.encoder.dim, dtype=np.float32)
    kept = RunProxies(proxies, *[np.empty(0, np.int64)] * 2)
    for assignment in ("static", "dynamic"):
        config = replace(state.run.config, assignment=assignment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nofuss.search.page.state.load_proxies", lambda *_: kept)
            base = Base(replace(state.run, config=config), state.encoder, state.index)
        named.append(base.stars.names[0])
    assert named == [classes[0], "proxy 0"]


def test_what_is_on_the_map_stays_in_its_place() -> None:
    x = torch.nn.functional.normalize(
        torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    )
    plane = lay_out(x[:40], x[40:])
    np.testing.assert_allclose(plane.place(x), plane.places, atol=1e-3)
    between = torch.nn.functional.normalize(x[:1] + 1e-3 * x[1:2])
    np.testing.assert_allclose(plane.place(between)[0], plane.places[0], atol=1e-2)
