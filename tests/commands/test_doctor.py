"""The doctor finds what was planted, says it in words and in JSON, and leaves the data alone."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nofuss.cli import main
from nofuss.commands.doctor import diagnose, doubts_of
from nofuss.data.collection import Collection
from nofuss.data.open import open_data
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.run.directory import create_run
from tests.asked import settings_of
from tests.tiny_run import scene

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """Three classes of four, a copy and a smaller, stronger compressed one across classes."""
    data = tmp_path / "data"
    for c, name in enumerate(("ant", "bee", "<cat>")):
        (data / name).mkdir(parents=True)
        for i in range(4):
            scene(10 * c + i).save(data / name / f"{i}.png")
    shutil.copy(data / "ant" / "0.png", data / "ant" / "copy.png")
    shutil.copy(data / "ant" / "1.png", data / "bee" / "torn.png")
    scene(21).resize((70, 70)).save(data / "ant" / "near.jpg", quality=40)
    (data / "bee" / "cut.png").write_bytes((data / "bee" / "0.png").read_bytes()[:300])
    (data / "bee" / "empty.jpg").write_bytes(b"")
    return data


def content_of(folder: Path) -> dict[str, str]:
    return {
        str(p): f"{p.stat().st_mtime_ns} {hashlib.sha256(p.read_bytes()).hexdigest()}"
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_what_was_planted_is_found(sick: Path) -> None:
    found = diagnose(open_data(sick))
    assert {(u["item"], u["reason"]) for u in found.unusable} == {
        ("bee/cut.png", "truncated"),
        ("bee/empty.jpg", "empty file"),
    }
    copies = {tuple(g.items): g.classes for g in found.duplicates}
    assert copies == {
        ("ant/0.png", "ant/copy.png"): ["ant"],
        ("ant/1.png", "bee/torn.png"): ["ant", "bee"],
    }
    near = {tuple(sorted(g.items)): g.classes for g in found.near_duplicates}
    assert near == {("<cat>/1.png", "ant/near.jpg"): ["<cat>", "ant"]}
    assert found.per_class == {"min": 4, "median": 6, "max": 7}
    assert found.doubtful_labels is None


def test_the_data_stay_untouched(sick: Path, capsys: Capture) -> None:
    before = content_of(sick)
    assert main(["doctor", str(sick)]) == 0
    printed = capsys.readouterr()
    assert content_of(sick) == before
    assert not printed.err
    for line in (
        "items per class: 4 to 7, median 6.0",
        "can't be used: 2",
        "exact copies with different labels: 1",
        "  ant/1.png = bee/torn.png (ant, bee)",
        "near-duplicates with different labels: 1",
        "next: nofuss train",
    ):
        assert line in printed.out


def test_json_holds_everything(sick: Path, capsys: Capture) -> None:
    assert main(["doctor", str(sick), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["unusable"]) == 2
    assert content["duplicates"][0]["items"] == ["ant/0.png", "ant/copy.png"]


def test_healthy_data_get_no_complaint(tmp_path: Path, capsys: Capture) -> None:
    for c in range(4):
        (tmp_path / f"class {c}").mkdir()
        for i in range(3):
            scene(100 + 10 * c + i).save(tmp_path / f"class {c}" / f"{i}.png")
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert not any(word in printed for word in ("can't", "copies", "duplicates", "doubtful"))
    assert f"next: nofuss train {tmp_path}" in printed


def test_rows_that_training_refuses_are_listed(tmp_path: Path, capsys: Capture) -> None:
    """The doctor names every row with a NaN or an infinity; training refuses them in one line."""
    vectors = np.random.default_rng(0).normal(size=(12, 5))
    vectors[3, 1], vectors[7, 0], vectors[8] = np.nan, 1e300, vectors[2]
    vectors[9] = vectors[3]
    file = tmp_path / "v.npz"
    np.savez(file, vectors=vectors, labels=np.arange(12) // 3)
    assert main(["doctor", str(file)]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    assert "can't be used: 3\n  row 3: NaN or infinity\n  row 7: NaN or infinity" in printed.out
    assert f"next: drop or fix the rows that can't be used, then nofuss train {file}" in printed.out
    assert main(["doctor", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [u["item"] for u in content["unusable"]] == ["row 3", "row 7", "row 9"]
    assert [g["items"] for g in content["duplicates"]] == [["row 2", "row 8"]]  # not 3 and 9
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "vectors has NaN or infinite values in rows 3, 7, 9; drop or fix them" in refused


def test_what_can_not_be_trained_on_is_not_suggested(tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "v.npz", vectors=np.eye(4))
    np.savez(tmp_path / "one.npz", vectors=np.eye(4), labels=[0, 0, 0, 0])
    for name, cure in (("v.npz", "add labels"), ("one.npz", "add items")):
        assert main(["doctor", str(tmp_path / name)]) == 0
        assert f"next: {cure}" in capsys.readouterr().out
        assert main(["train", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
        capsys.readouterr()


def collection_of(vectors: torch.Tensor, labels: torch.Tensor) -> Collection:
    return Collection(
        name="made up",
        layout="",
        array=vectors.numpy(),
        labels=labels.numpy(),
        class_names=tuple(f"class {c}" for c in range(int(labels.max()) + 1)),
    )


def test_flipped_labels_are_doubted() -> None:
    """Classes far apart, three labels wrong: those three and no other."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(100) // 20
    x = normalize(torch.eye(5)[truth] + 0.05 * torch.randn(100, 5, generator=generator))
    labels = truth.clone()
    wrong = [3, 47, 80]
    labels[wrong] = (truth[wrong] + 1) % 5
    doubts = doubts_of(x, collection_of(x, labels))
    assert sorted(d.item for d in doubts) == sorted(f"row {i}" for i in wrong)
    for doubt in doubts:
        assert doubt.neighbours_say == f"class {int(truth[int(doubt.item.split()[1])])}"
        assert doubt.fraction > 0.9


def test_a_run_is_asked_about_labels(sick: Path, tmp_path: Path, capsys: Capture) -> None:
    """Also with pictures that can't be read among them."""
    made = create_run(settings_of("pictures", 40, data=sick, out=tmp_path / "run"), name="run")
    embedder = build_embedder("convnet", dim=8, channels=3, weights=None)
    save_model(made.model, embedder)
    assert main(["doctor", str(sick), "--run", str(made.path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content["doubtful_labels"], list)


def test_it_says_that_no_label_is_doubted(tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "data.npz", vectors=np.eye(4).repeat(5, 0), labels=np.arange(20) // 5)
    made = create_run(settings_of(out=tmp_path / "run"), name="run")
    embedder = build_embedder("identity", dim=4, channels=4, weights=None)
    save_model(made.model, embedder)
    assert main(["doctor", str(tmp_path / "data.npz"), "--run", str(made.path)]) == 0
    assert "doubtful labels: none" in capsys.readouterr().out


def test_the_suggested_command_reads_the_classes_alike(tmp_path: Path, capsys: Capture) -> None:
    for name in ("robin", "wren", "owl", "tit"):
        for number in range(2):
            colour = (40 * len(name), 100 * number, 7)
            Image.new("RGB", (40, 40), colour).save(tmp_path / f"{name}_{number}.png")
    assert main(["doctor", str(tmp_path), "--label-pattern", "^(.+)_"]) == 0
    assert "--label-pattern '^(.+)_'" in capsys.readouterr().out
