"""The examples run, those that need other packages where these are installed."""

import json
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import nofuss
from nofuss.training.callbacks import Event
from tests.tiny_run import write_pictures

EXAMPLES = Path(nofuss.__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="an installed package has none")


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module(name)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs pip install lightning")
    monkeypatch.chdir(tmp_path)
    before, after = example("lightning_module", monkeypatch).main(epochs=3)
    assert after > before + 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs pip install wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    sent, finish = list[dict[str, float]](), wandb.finish

    def read_then_finish() -> None:
        sent.append(dict(wandb.summary))
        finish()

    log = example("wandb_callback", monkeypatch).log
    monkeypatch.setattr(wandb, "finish", read_then_finish)
    run = small_training(tmp_path, log)
    assert sent[0]["recall@1"] == recall_of(run)
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "tracked").as_uri())
    run = small_training(tmp_path, example("mlflow_callback", monkeypatch).log)
    stored = mlflow.MlflowClient().search_runs(["0"])[0].data
    assert stored.metrics["scores/recall_at_1"] == recall_of(run)
    assert stored.params["epochs"] == "1"


@pytest.mark.slow
def test_rendered_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every class has pictures, and they are the same each time."""
    module = example("rendered_objects", monkeypatch)
    for folder, more in (("all", []), ("again", ["--classes", "1"])):
        command = ["", str(tmp_path / folder), "--views", "1", "--size", "24", *more]
        monkeypatch.setattr(sys, "argv", command)
        module.main()
    assert nofuss.open_data(tmp_path / "all").num_classes == 40
    (again,) = (tmp_path / "again").rglob("*.jpg")
    first = tmp_path / "all" / again.relative_to(tmp_path / "again")
    assert first.read_bytes() == again.read_bytes()


def small_training(folder: Path, callback: Any) -> Path:
    data = write_pictures(folder / "data")
    settings: dict[str, Any] = {
        "preset": "small",
        "dim": 8,
        "size": 24,
        "batch_size": 8,
        "epochs": 1,
    }
    return nofuss.train(data, out=folder / "run", callback=callback, **settings)


def recall_of(run: Path) -> float:
    return float(json.loads((run / "scores.json").read_text())["recall@1"])


@pytest.mark.slow
def test_events_of_a_run_on_vectors_reach_the_end(vector_run: Path, tmp_path: Path) -> None:
    events = list[Event]()
    nofuss.train(vector_run.parent / "data.npz", out=tmp_path / "again", callback=events.append)
    kinds = [event.kind for event in events if event.kind != "progress"]
    assert [kinds[0], kinds[-1]] == ["start", "end"]
    assert "recall@1" in events[-1].values


@pytest.mark.docs
def test_plain_loop_raises_recall_on_unseen_digits() -> None:
    command = [sys.executable, "-W", "error", EXAMPLES / "plain_loop.py"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(float, re.findall(r"\d\.\d+", run.stdout))
    assert after > before + 0.2


def test_documented_comparison_is_the_one_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "compare_with_pml.py"))
    assert capsys.readouterr().out in (EXAMPLES.parent / "docs" / "losses.md").read_text()
