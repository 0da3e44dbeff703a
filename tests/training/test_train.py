"""The way of a training: what can't be read is left out, and every picture is decoded once."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import nofuss
from nofuss.data.decode import decode
from nofuss.data.open import open_usable
from nofuss.errors import RunError
from nofuss.training.callbacks import Event
from tests.tiny_run import draw

pytestmark = pytest.mark.slow
FIXED = {"preset": "frozen", "backbone": "convnet", "size": 64}
SPLIT = FIXED | {"test_fraction": 0.5}
SMALL = {"preset": "small", "size": 24, "dim": 8, "batch_size": 8, "epochs": 2}
PROBLEMS = {
    "a/1.png": "duplicate",
    "b/0.png": "not a picture",
    "c/3.png": "truncated",
    "e/5.png": "empty file",
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six classes of eight pictures; three of these are damaged."""
    folder = tmp_path / "photos"
    for number in range(48):
        (folder / "abcdef"[number % 6]).mkdir(parents=True, exist_ok=True)
        picture = draw(number % 6, number // 6, side=72)
        picture.save(folder / "abcdef"[number % 6] / f"{number // 6}.png")
    shutil.copy(folder / "a/0.png", folder / "a/1.png")
    content = (folder / "c/3.png").read_bytes()
    (folder / "b/0.png").write_bytes(b"no picture")
    (folder / "c/3.png").write_bytes(content[: len(content) // 2])
    (folder / "e/5.png").write_bytes(b"")
    return folder


def noted(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


def contents(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name[0] != "."}


def weights(run: Path) -> bytes:
    (file,) = (run / "model").glob("*.safetensors")
    return file.read_bytes()


def stop_at(what: str) -> Any:
    """A callback that interrupts the first event of this kind, or work of this name."""

    def callback(event: Event) -> None:
        if what in (event.kind, event.values.get("what")):
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("options", [FIXED, SPLIT, SMALL], ids=str)
def test_what_can_not_be_read_is_left_out(
    photos: Path, tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By the pass that computes features, or by a scan where there is none."""
    run = nofuss.train(photos, out=tmp_path / "run", **options)
    with (run / "scan.csv").open(newline="") as file:
        assert {row["file"]: row["reason"] for row in csv.DictReader(file)} == PROBLEMS
    assert "48 images checked: " in caplog.text
    assert "3 left out: b/0.png (not a picture); c/3.png" in caplog.text
    usable = open_usable(photos)
    assert len(usable) == 45
    assert noted(run, "config.json")["fingerprint"] == usable.fingerprint()


@pytest.mark.parametrize("options", [FIXED, SPLIT, SMALL], ids=str)
def test_each_picture_is_decoded_once_before_training(
    photos: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Where features are computed, no scan decodes any, nor does the report to find copies."""
    by_scan, by_loader = Counter[str](), Counter[str]()

    def scan(path: Path, **how: Any) -> object:
        by_scan[str(path.relative_to(photos))] += 1
        return decode(path, **how)

    def load(path: Path, **how: Any) -> object:
        by_loader[str(path.relative_to(photos))] += 1
        return decode(path, **how)

    monkeypatch.setattr("nofuss.data.scan.decode", scan)
    monkeypatch.setattr("nofuss.data.loader.decode", load)
    nofuss.train(photos, out=tmp_path / "run", **options)
    once = by_scan if options is SMALL else by_loader
    assert set(once.values()) == {1}
    assert len(once) == 48
    assert options is SMALL or not by_scan


@pytest.mark.parametrize(
    ("moment", "options"),
    [("computing features", SPLIT), ("checking files", SMALL), ("epoch", SMALL)],
)
def test_a_resumed_run_is_of_the_same_items(
    photos: Path, tmp_path: Path, cache: Path, moment: str, options: dict[str, Any]
) -> None:
    """Wherever it stopped, even before its data were known."""
    whole = nofuss.train(photos, out=tmp_path / "whole", **options)
    run = tmp_path / "run"
    for file in cache.iterdir():
        file.unlink()
    with pytest.raises(KeyboardInterrupt):
        nofuss.train(photos, out=run, callback=stop_at(moment), **options)
    assert (noted(run, "config.json")["fingerprint"] is None) == (moment != "epoch")
    nofuss.train(out=run, resume=True)
    assert noted(run, "data.json") == noted(whole, "data.json")
    for name in ("fingerprint", "seed"):
        assert noted(run, "config.json")[name] == noted(whole, "config.json")[name]
    assert (run / "scan.csv").read_text() == (whole / "scan.csv").read_text()
    assert weights(run) == weights(whole)


def test_a_finished_run_is_left_as_it_is(photos: Path, tmp_path: Path) -> None:
    run = nofuss.train(photos, out=tmp_path / "run", **SMALL)
    before = contents(run)
    moved = photos.rename(tmp_path / "moved")
    assert nofuss.train(out=run, resume=True) == run, "the data are needed for nothing"
    assert contents(run) == before
    assert nofuss.train(moved, out=run, resume=True) == run
    assert noted(run, "config.json")["data"] == str(moved)
    (moved / "b/1.png").unlink()
    with pytest.raises(RunError, match=r"data differ from what .*nothing was changed: give"):
        nofuss.train(moved, out=run, resume=True)


def test_a_run_is_not_resumed_with_other_data(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        nofuss.train(photos, out=run, callback=stop_at("epoch"), **SMALL)
    (photos / "b/0.png").unlink()  # it was left out
    with pytest.raises(KeyboardInterrupt):
        nofuss.train(out=run, resume=True, callback=stop_at("epoch"))
    (photos / "b/1.png").unlink()
    noted_before = noted(run, "config.json"), noted(run, "data.json")
    with pytest.raises(RunError, match=r"data differ from what .*nothing was changed: give"):
        nofuss.train(out=run, resume=True)
    assert noted_before == (noted(run, "config.json"), noted(run, "data.json"))
