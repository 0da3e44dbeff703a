"""Networks are chosen by folds: the cheapest, unless others gain; and everything follows them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import nofuss
from nofuss.cli import main
from nofuss.data.decode import decode_resized
from nofuss.data.transforms import center_views
from nofuss.errors import UsageError
from nofuss.geometry import normalize
from nofuss.model.backbones import build_backbone, side_by_side
from nofuss.model.embedder import for_inference
from nofuss.model.features import multiplications
from nofuss.run.directory import Run
from nofuss.search.page.state import open_state
from nofuss.training.choose_networks import pick, try_networks
from nofuss.training.folds import class_folds
from tests.asked import settings_of
from tests.search.serving import serving
from tests.tiny_run import scene

TWO = "efficientnet-lite0@64,efficientnet-lite0@96"


def halves(*, classes: int = 40, each: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Features of two networks that each see half of what makes a class, and the labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = torch.randn(classes, 16, generator=generator)
    x = centres[labels] + 0.8 * torch.randn(len(labels), 16, generator=generator)
    return x[:, :8], x[:, 8:], labels


def best_of(labels: Tensor, *features: Tensor) -> tuple[int, ...]:
    costs = [1.0 + i for i in range(len(features))]
    return pick(try_networks(features, labels, class_folds(labels)), costs)


def test_two_that_know_different_things_stand_side_by_side() -> None:
    first, second, labels = halves()
    assert best_of(labels, first, second) == (0, 1)


def test_a_copy_or_noise_adds_nothing() -> None:
    first, second, labels = halves()
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
    assert best_of(labels, first, first.clone()) == (0,)
    assert best_of(labels, first, noise) == (0,)
    assert best_of(labels, noise, first) == (1,)
    assert best_of(labels, noise, first, second) == (1, 2)


def test_too_few_classes_keep_the_cheapest() -> None:
    """What the eight classes of four folds gain is within chance."""
    first, second, labels = halves(classes=8, each=4)
    assert best_of(labels, first, second) == (0,)


def test_networks_side_by_side_stay_as_they_are() -> None:
    """Mirror images and precision of the features are those of the queries."""
    parts = [build_backbone(name, weights=None) for name in TWO.split(",")]
    for part in parts:
        part.mirror, part.precision = True, "bf16"
    both = side_by_side(parts)
    for network in (both, *both.parts):
        assert (network.mirror, network.precision) == (True, "bf16")


@pytest.mark.slow
def test_queries_are_embedded_as_the_index_was(tmp_path: Path) -> None:
    """Also by networks that folds have chosen: the vector of a picture is the one in the index."""
    for number in range(48):
        place = tmp_path / "photos" / f"scene {number % 12}"
        place.mkdir(parents=True, exist_ok=True)
        scene(number % 12 * 100 + number // 12, 120).save(place / f"{number}.jpg", quality=95)
    run = nofuss.train(tmp_path / "photos", backbone=TWO, out=tmp_path / "run")
    assert "networks" in json.loads((run / "choice.json").read_text())
    index = open_state(Run.open(run)).index
    names = index.sample(5)
    stored = torch.stack([torch.as_tensor(item.vector) for item in index.get(names, vectors=True)])
    torch.testing.assert_close(nofuss.load(run).embed(names), stored, atol=1e-3, rtol=0)


def test_cost_is_that_of_the_operations() -> None:
    cost = [multiplications(build_backbone(name, weights=None)) for name in TWO.split(",")]
    assert cost[1] / cost[0] == pytest.approx((96 / 64) ** 2, rel=0.01)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backbone": "efficientnet-lite0,efficientnet-lite0"}, "names a network twice"),
        ({"backbone": "efficientnet-lite0,convnet"}, "convnet can't stand beside others"),
        ({"backbone": f"efficientnet-lite0,{TWO.replace(',', '+')}"}, "can't stand beside others"),
        ({"backbone": "efficientnet-lite0,lite9"}, "unknown backbone 'lite9'"),
        ({"backbone": TWO, "preset": "finetune"}, "several networks stay as they are"),
        ({"backbone": TWO, "size": 64}, "--size is for one network"),
        ({"backbone": "efficientnet-lite0@x"}, "expected NAME@SIDE"),
        ({"backbone": "efficientnet-lite0@64", "size": 96}, "expected NAME@SIDE, and no --size"),
        ({"backbone": "efficientnet-lite0", "budget_minutes": 3}, "--budget-minutes is for"),
    ],
)
def test_names_that_make_no_sense_are_one_line(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        settings_of("pictures", **options)


@pytest.mark.slow
def test_auto_is_all_that_fit_the_budget(cache: Path) -> None:
    """The fastest one always does; settings have the names, so that a run can be resumed."""
    few = settings_of("pictures", backbone="auto", budget_minutes=1e-9).backbone
    assert few.startswith("efficientnet-lite")
    assert "," not in few
    assert len(settings_of("pictures", backbone="auto").backbone.split(",")) > 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on scenes, of two networks, both kept: three classes are too few to choose by."""
    folder = tmp_path_factory.mktemp("several")
    for number in range(15):
        place = folder / "photos" / f"scene {number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        scene(number % 3 * 100 + number, 120).save(place / f"{number}.jpg", quality=95)
    return nofuss.train(folder / "photos", backbone=TWO, out=folder / "run")


def photos(run: Path) -> list[Path]:
    return sorted((run.parent / "photos").rglob("*.jpg"))


@pytest.mark.slow
def test_a_run_holds_all_its_networks(run: Path) -> None:
    """Each sees the picture in its own size; features are of length 1, then side by side."""
    encoder, paths = nofuss.load(run), photos(run)[:4]
    parts = for_inference(encoder.embedder).backbone.parts
    assert [part.preprocessing and part.preprocessing.size for part in parts] == [64, 96]
    features = []
    for part in parts:
        look = part.preprocessing
        assert look is not None
        views = center_views([decode_resized(path, look) for path in paths], look)
        with torch.no_grad():
            both = part.network(views) + part.network(views.flip(-1))
        features.append(normalize(both))
    head = encoder.embedder.head
    expected = normalize(head(encoder.embedder.to_head(torch.cat(features, 1)))).detach()
    torch.testing.assert_close(encoder.embed(paths), expected, atol=1e-4, rtol=0)
    stored = json.loads((run / "model" / "model.json").read_text())
    assert stored["backbone"] == TWO.replace(",", "+")
    assert len(stored["preprocessing"]) == 2


@pytest.mark.slow
def test_it_is_searched_and_served(run: Path) -> None:
    path = photos(run)[7]
    assert main(["search", str(run), str(path), "--json"]) == 0
    with serving(run) as server:
        answer = server.upload(path.read_bytes()).json
    assert answer["results"][0]["distance"] < 1e-3


@pytest.mark.slow
def test_onnx_has_an_input_for_each_network(run: Path, tmp_path: Path) -> None:
    for package in ("onnxscript", "onnx"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    assert main(["export", str(run), "--onnx", str(out)]) == 0
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    looks = json.loads(session.get_modelmeta().custom_metadata_map["preprocessing"])
    given, paths = {}, photos(run)[:3]
    for each, stored in zip(session.get_inputs(), looks, strict=True):
        look = nofuss.config.Preprocessing(**stored)
        views = center_views([decode_resized(path, look) for path in paths], look)
        given[each.name] = np.ascontiguousarray(views.numpy())
    (found,) = session.run(None, given)
    torch.testing.assert_close(
        torch.from_numpy(found), nofuss.load(run).embed(paths), atol=1e-4, rtol=0
    )
