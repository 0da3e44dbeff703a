"""A backbone in onnxruntime: torch's features, and torch where it can't."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import nofuss
from nofuss.config import Options, Preprocessing
from nofuss.data.readers.arrays import from_arrays
from nofuss.model.activations import fixed_stages
from nofuss.model.backbones import Backbone, inference_key
from nofuss.model.embedder import build_embedder, for_inference
from nofuss.model.onnx import WORTH_EXPORT, OnnxNetwork, accelerate, can_accelerate, graph_name
from nofuss.model.saved import load_model, save_model
from nofuss.model.stages import Trunk
from nofuss.training.network import build_model

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("onnxscript", reason="the onnx extra is not installed")


def lite0(*, mirror: bool = False) -> Backbone:
    return for_inference(build_embedder("efficientnet-lite0", dim=4, mirror=mirror)).backbone


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the graph of Lite0: exporting takes seconds, so once."""
    folder = tmp_path_factory.mktemp("graphs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOFUSS_CACHE", str(folder))
        accelerate(lite0(), WORTH_EXPORT)
    assert len(list(folder.glob("graph-*.sqlite"))) == 1
    return folder


@pytest.fixture
def folder(graphs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOFUSS_CACHE", str(graphs))
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("mirror", [False, True])
def test_features_are_torchs(folder: Path, mirror: bool) -> None:
    fast, plain = lite0(mirror=mirror), lite0(mirror=mirror)
    accelerate(fast, 1)  # its graph is there, so from the first picture
    assert isinstance(fast.network, OnnxNetwork)
    assert not can_accelerate(fast)  # nothing to do twice
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for count in (1, 3):
            x = torch.randn(count, 3, 224, 224, generator=g).to(memory_format=torch.channels_last)
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_copy_runs_a_session_of_its_own(folder: Path) -> None:
    fast = lite0()
    accelerate(fast, 1)
    x = torch.randn(6, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))


def test_other_weights_have_another_graph() -> None:
    backbone = lite0()
    before = graph_name(backbone)
    with torch.no_grad():
        next(backbone.parameters()).add_(1)
    backbone.key = inference_key(backbone)
    assert graph_name(backbone) != before


def test_torch_stays_where_it_is_asked_for_or_pictures_are_small_or_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path))
    small = for_inference(build_embedder("convnet", dim=4)).backbone
    vectors = for_inference(build_embedder("identity", dim=4, channels=3)).backbone
    few, asked = lite0(), lite0()
    accelerate(few, WORTH_EXPORT - 1)  # for which an export takes longer than it saves
    for backbone in (small, vectors):
        accelerate(backbone, WORTH_EXPORT)
    monkeypatch.setenv("NOFUSS_RUNTIME", "torch")
    accelerate(asked, WORTH_EXPORT)
    for backbone in (small, vectors, few, asked):
        assert not isinstance(backbone.network, OnnxNetwork)
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_image_has_the_features_of_the_picture() -> None:
    """Averaged over both, the order can't matter; in training there is no averaging."""
    embedder = build_embedder("efficientnet-lite0", dim=4, mirror=True).eval()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(embedder(x), embedder(x.flip(-1)), rtol=1e-4, atol=1e-5)
        plain = build_embedder("efficientnet-lite0", dim=4).eval()
        both = (plain.backbone(x) + plain.backbone(x.flip(-1))) / 2
        torch.testing.assert_close(embedder.backbone(x), both, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fixed_stages_at_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path))
    embedder = build_embedder("efficientnet-lite0", dim=4).eval()
    embedder.backbone.preprocessing = Preprocessing(size=128, resize=146)
    fast = fixed_stages(embedder, 5, embedder.backbone.preprocessing)
    accelerate(fast, WORTH_EXPORT)
    assert isinstance(fast.network, OnnxNetwork)
    x = torch.randn(5, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = Trunk(embedder.backbone, 5)(x)
    torch.testing.assert_close(fast.network(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [None, 128])
def test_a_backbone_knows_the_size_of_its_pictures(tmp_path: Path, size: int | None) -> None:
    """A graph is exported for one size."""
    collection = from_arrays(
        {"images": np.zeros((4, 100, 100, 3), np.uint8), "labels": np.arange(4) % 2}, name="x"
    )
    embedder = build_model(Options(size=size), "frozen", collection)
    preprocessing = embedder.backbone.preprocessing
    assert preprocessing is not None
    assert preprocessing.size == (size or 224)
    save_model(tmp_path / "model", embedder)
    assert load_model(tmp_path / "model")[0].backbone.preprocessing == preprocessing


@pytest.mark.slow
def test_training_leaves_the_graph_for_whoever_embeds_next(cache: Path, tmp_path: Path) -> None:
    """Also of few pictures; from the first picture, and to rounding what torch gives."""
    images = np.random.default_rng(0).integers(0, 256, (12, 100, 100, 3), np.uint8)
    labels = np.repeat(np.arange(4), 3)
    run = nofuss.train((images, labels), out=tmp_path / "run", preset="frozen")
    encoder = nofuss.load(run)
    parts = encoder.embedder.backbone.parts
    assert len([*cache.glob("graph-*.sqlite")]) == len(parts) == 2
    found = encoder.embed(images[:1])
    assert all(isinstance(part.network, OnnxNetwork) for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOFUSS_RUNTIME", "torch")
        torch.testing.assert_close(found, nofuss.load(run).embed(images[:1]), rtol=0, atol=1e-4)
