"""The rehearsal without held-out classes: done once, and known to a run that goes on."""

from pathlib import Path

import numpy as np
import pytest

from nofuss.config import TrainConfig
from nofuss.pipeline import train

AGAIN = "now with all training classes"


def test_a_resumed_run_remembers_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(60), 6)
    vectors = random.normal(size=(60, 8))[labels] + 0.5 * random.normal(size=(360, 8))
    np.savez(tmp_path / "x.npz", vectors=vectors, labels=labels)
    run = train(TrainConfig(data=tmp_path / "x.npz", out=tmp_path / "run", epochs=2, dim=4))
    assert AGAIN in capsys.readouterr().out
    model = (run / "model" / "model.json").read_bytes()
    assert b'"threshold"' in model
    train(TrainConfig(out=run, resume=True))
    assert AGAIN not in capsys.readouterr().out
    assert (run / "model" / "model.json").read_bytes() == model
    (run / "holdout.json").write_text("{}")
    train(TrainConfig(out=run, resume=True))
    assert AGAIN in capsys.readouterr().out  # damaged: found again, the same
    assert (run / "model" / "model.json").read_bytes() == model
