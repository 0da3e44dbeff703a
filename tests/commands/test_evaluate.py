"""`nofuss evaluate RUN`: all files of the run that hold scores say the same afterwards."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.cli import main
from nofuss.commands.scoring import still_true
from nofuss.data.corrections import Correction
from nofuss.evaluate import recall_at_k
from nofuss.files import read_json, write_json
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.search import Index
from nofuss.search.feedback import append
from tests.tiny_run import train_vectors

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(own_vector_run: Path) -> Path:
    return own_vector_run


def scores_of(run: Path) -> dict[str, object]:
    return read_json(run / "scores.json")


def test_the_card_is_that_of_training_for_the_same_model(run: Path, vector_run: Path) -> None:
    card, scores = (run / "README.md").read_text(), scores_of(run)
    card = card.replace(str(vector_run), str(run))
    (run / "README.md").write_text("of another day")
    assert main(["evaluate", str(run)]) == 0
    assert (run / "README.md").read_text() == card
    assert scores_of(run) == scores


def test_the_card_follows_the_scores_and_an_old_gain_is_dropped(run: Path) -> None:
    baselines = scores_of(run)["baselines"]
    assert "gain" in scores_of(run)
    shutil.rmtree(run / "model")
    save_model(run / "model", build_embedder("identity", dim=2, channels=16, seed=5))
    assert main(["evaluate", str(run)]) == 0
    scores = scores_of(run)
    assert scores["baselines"] == baselines
    assert "gain" not in scores
    card = (run / "README.md").read_text()
    assert f"| recall@1 | {100 * float(str(scores['recall@1'])):.2f} [" in card
    assert "Over the" not in card
    assert "Learning paid" not in (run / "report.html").read_text()


def test_the_report_goes_by_the_labels_that_were_corrected_on_the_page(run: Path) -> None:
    """A wrong correction is a doubtful label at once; the scores stay those of the data."""
    items = [item for item in Index.load(run / "index").items() if item.split == "test"]
    item, other = items[0], next(each for each in items if each.label != items[0].label)
    before = scores_of(run)
    assert main(["evaluate", str(run)]) == 0
    row = f"row {item.name.rpartition('#')[2]}"
    assert f"label,{row}," not in (run / "suspects.csv").read_text()
    append(run, [Correction(item.name, str(item.label), other.label)])
    assert main(["evaluate", str(run)]) == 0
    suspects = [line.split(",") for line in (run / "suspects.csv").read_text().splitlines()]
    assert ["label", row, other.label] in [each[:3] for each in suspects]
    assert scores_of(run) == before


def test_the_table_names_what_the_run_keeps(run: Path, capsys: Capture) -> None:
    write_json(run / "scores.json", scores_of(run) | {"method": "closed form"})
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert "closed form" in capsys.readouterr().out


def test_a_gain_stays_while_the_scores_do() -> None:
    gain = {"over": "raw", "recall@1": [0.1, 0.0, 0.2], "map@r": [0.2, 0.1, 0.3]}
    raw = {"recall@1": 0.5, "map@r": 0.25}
    before = {"gain": gain, "baselines": {"raw": raw}, "method": "trained", "nmi": 0.5}
    before |= {"recall@1": 0.6, "map@r": 0.45}
    same = {"recall@1": 0.6 + 1e-7, "map@r": 0.45}
    assert still_true(before, same) == {k: before[k] for k in ("gain", "baselines", "method")}
    assert "gain" not in still_true(before, {"recall@1": 0.6, "map@r": 0.46})
    assert still_true({"gain": "forged"}, same) == {}
    assert still_true({}, same) == {}


@pytest.mark.slow
def test_queries_and_a_gallery_are_scored_alike_by_training_and_by_evaluate(
    tmp_path: Path, capsys: Capture
) -> None:
    random = np.random.default_rng(0)
    rows = ["path,label,split"]
    for label in range(8):
        for i in range(6):
            side = "train" if label < 4 else "query" if i < 2 else "gallery"
            shade = np.clip(30 * label + random.integers(0, 40, (32, 32, 3)), 0, 255)
            Image.fromarray(shade.astype(np.uint8)).save(tmp_path / f"{label}-{i}.png")
            rows.append(f"{label}-{i}.png,class {label},{side}")
    (tmp_path / "q.csv").write_text("\n".join(rows))
    settings = ["--preset", "small", "--epochs", "1", "--dim", "8", "--val-fraction", "0"]
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "q.csv"), "--out", str(run), *settings]) == 0
    before = scores_of(run)
    assert (before["queries"], before["classes"]) == (8, 4)
    assert main(["evaluate", str(run)]) == 0
    after = scores_of(run)
    assert after["recall@1"] == before["recall@1"]
    assert after["baselines"] == before["baselines"]
    capsys.readouterr()
    assert main(["evaluate", str(run), str(tmp_path / "q.csv")]) == 0
    assert "classes of the same names as 4 of these 8; scores" in capsys.readouterr().out


def test_a_gallery_without_queries_is_refused_before_training(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["path,label,split"]
    for label in range(6):
        for i in range(3):
            Image.new("RGB", (32, 32), (30 * label, 10 * i, 0)).save(tmp_path / f"{label}-{i}.png")
            rows.append(f"{label}-{i}.png,{label},{'train' if label < 3 else 'gallery'}")
    (tmp_path / "g.csv").write_text("\n".join(rows))
    assert main(["train", str(tmp_path / "g.csv"), "--out", str(tmp_path / "run")]) == 2
    assert "has rows of split gallery but none of split query" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_baselines_of_other_queries_are_dropped() -> None:
    before = {"protocol": "a", "queries": 48, "baselines": {"raw": {}}, "method": "closed form"}
    same = still_true(before, {"protocol": "a", "queries": 48})
    assert same == {"method": "closed form", "baselines": {"raw": {}}}
    assert still_true(before, {"protocol": "a", "queries": 8}) == {"method": "closed form"}


@pytest.mark.slow
def test_data_that_have_moved(tmp_path: Path, capsys: Capture) -> None:
    run, data = train_vectors(tmp_path), tmp_path / "data.npz"
    (tmp_path / "elsewhere").mkdir()
    moved = data.rename(tmp_path / "elsewhere" / "data.npz")
    capsys.readouterr()
    for command in (["evaluate", str(run)], ["index", str(run)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"were at {data} and are not there now" in said
        assert f"nofuss train NEW --out {run} --resume" in said
    made = (run / "environment.json").read_bytes()
    assert main(["train", str(moved), "--out", str(run), "--resume"]) == 0
    assert (run / "environment.json").read_bytes() == made, "how the run was made is not forgotten"
    assert read_json(run / "config.json")["data"] == str(moved)
    assert main(["evaluate", str(run)]) == 0


def photos(folder: Path, classes: range, each: int, *, seed: int = 0) -> Path:
    """Noisy pictures of a shade a class, in folders."""
    random = np.random.default_rng(seed)
    for label in classes:
        (folder / f"class {label}").mkdir(parents=True)
        for i in range(each):
            shade = np.clip(25 * label + random.integers(0, 40, (32, 32, 3)), 0, 255)
            Image.fromarray(shade.astype(np.uint8)).save(folder / f"class {label}" / f"{i}.png")
    return folder


SMALL = ["--preset", "small", "--epochs", "1", "--dim", "8", "--val-fraction", "0"]


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    data, run = photos(tmp_path / "photos", range(8), 5), tmp_path / "run"
    words = ["train", str(data), "--out", str(run), "--test-fraction", "0.5", *SMALL]
    assert main(words) == 0
    return run


@pytest.mark.slow
def test_queries_of_classes_that_the_gallery_lacks(
    tmp_path: Path, small_run: Path, capsys: Capture
) -> None:
    """They are no queries, are counted as none, and are said to be left out."""
    queries = photos(tmp_path / "queries", range(6), 3, seed=1)
    gallery = photos(tmp_path / "gallery", range(4), 4, seed=2)
    some = photos(tmp_path / "some", range(4), 3, seed=1)  # the same pictures of classes 0 to 3
    found = {}
    for name, data in (("all", queries), ("some", some)):
        capsys.readouterr()
        words = ["evaluate", str(small_run), str(data), "--gallery", str(gallery), "--json"]
        assert main(words) == 0
        said = capsys.readouterr()
        found[name] = json.loads(said.out)
        assert ("6 of 18 queries are left out" in said.err) == (name == "all")
    assert (found["all"]["queries"], found["all"]["classes"]) == (12, 4)
    for score in ("recall@1", "map@r", "recall@1_interval"):
        assert found["all"][score] == pytest.approx(found["some"][score])


@pytest.mark.slow
def test_known_scores_are_shown_after_a_photograph_was_deleted(
    tmp_path: Path, small_run: Path, capsys: Capture
) -> None:
    before = scores_of(small_run)
    (tmp_path / "photos" / "class 0" / "0.png").unlink()
    capsys.readouterr()
    assert main(["evaluate", str(small_run), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == before
    assert "the data differ from what" in said.err
    assert "these are the stored scores" in said.err
    assert scores_of(small_run) == before
    assert main(["evaluate", str(small_run), "--extended"]) == 2  # can't be known


def test_other_data_are_scored_beside_the_untrained_features(
    tmp_path: Path, run: Path, capsys: Capture
) -> None:
    random = np.random.default_rng(5)
    x, labels = random.normal(size=(60, 16)).astype(np.float32), np.arange(60) % 6
    x[:, :6] += 3 * np.eye(6, dtype=np.float32)[labels]
    np.savez(tmp_path / "other.npz", features=x, labels=labels)
    capsys.readouterr()
    assert main(["evaluate", str(run), str(tmp_path / "other.npz"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    ((name, raw),) = scores["baselines"].items()
    assert name == "untrained features, 16-d"
    assert raw["recall@1"] == pytest.approx(recall_at_k(x, labels)[1])
    assert scores["gain"]["over"] == name
    gap = scores["recall@1"] - raw["recall@1"]
    assert scores["gain"]["recall@1"][0] == pytest.approx(gap)
