"""`nofuss export`: ONNX files that compute what torch does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nofuss
from nofuss.cli import main
from nofuss.data.decode import decode_resized
from nofuss.data.transforms import center_views
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.run.directory import create_run
from tests.asked import settings_of
from tests.tiny_run import write_pictures

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    data = write_pictures(folder / "data", per_class=3)
    made = create_run(settings_of("pictures", 40, data=data, out=folder / "run"), name="run")
    embedder = build_embedder("convnet", dim=8, channels=3, weights=None, mirror=True)
    save_model(made.model, embedder, class_names=["a", "b"])
    return made.path


@pytest.mark.slow
def test_onnx_gives_the_embeddings_of_pictures(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """By someone who has only the file and a picture: its metadata say how to prepare it."""
    for package in ("onnxscript", "onnx"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    assert main(["export", str(run), "--onnx", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "largest difference from torch on 16 random inputs" in printed
    session = runtime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    stored = json.loads(about["preprocessing"])
    preprocessing = nofuss.config.Preprocessing(**stored)
    assert str(stored["resize"]) in about["input"]
    assert json.loads(about["class_names"]) == ["a", "b"]
    paths = sorted((run.parent / "data").rglob("*.png"))[:3]
    x = center_views([decode_resized(p, preprocessing) for p in paths], preprocessing)
    (found,) = session.run(None, {"inputs": np.ascontiguousarray(x.numpy())})
    expected = nofuss.load(run).embed(paths)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
    capsys.readouterr()
    assert main(["export", str(run), "--onnx", str(out)]) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_without_the_packages_the_command_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(run), "--onnx", str(tmp_path / "m.onnx")]) == 2
    assert "pip install 'nofuss[onnx]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_suffixes_are_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(run), "--onnx", str(tmp_path / "m.pt")]) == 2
    assert ".onnx" in capsys.readouterr().err
