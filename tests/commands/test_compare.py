"""`nofuss compare`: paired differences between runs, on the same items."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nofuss import Index, train
from nofuss.cli import main
from nofuss.commands.compare import _difference, _same_but_for_the_seed
from nofuss.evaluate import paired_difference, per_query
from nofuss.files import read_json, write_json
from nofuss.run.directory import Run
from tests.asked import settings_of


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a trained head, two of untrained features, and one of another split."""
    home = tmp_path_factory.mktemp("compare")
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 8)
    x = random.normal(size=(24, 10))[labels] + 0.4 * random.normal(size=(len(labels), 10))
    noise = 6 * random.normal(size=(len(labels), 6))  # what whitening within classes takes away
    split = np.where(labels < 12, "train", "test")
    items = np.concatenate([x, noise], 1).astype(np.float32)
    np.savez(home / "x.npz", vectors=items, labels=labels, split=split)
    np.savez(home / "free.npz", vectors=items, labels=labels)
    for seed in (0, 1):
        train(home / "x.npz", out=home / f"trained-{seed}", seed=seed)
        train(home / "x.npz", out=home / f"untrained-{seed}", seed=seed, head="untrained")
    train(home / "free.npz", out=home / "other")
    train(home / "free.npz", out=home / "other-untrained", head="untrained")
    return home


def compare(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["compare", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def vectors_of_tested(run: Path) -> torch.Tensor:
    """Vectors of the test items."""
    items = Index.load(run / "index").items(vectors=True)
    return torch.stack([item.vector for item in items if item.split == "test"])


@pytest.mark.slow
def test_two_runs(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = home / "untrained-0", home / "trained-0"
    code, out, err = compare(capsys, *runs, "--json")
    assert code == 0, err
    first, second = json.loads(out)["methods"]
    assert "difference" not in first["recall@1"]
    found = second["recall@1"]["difference"]
    with np.load(home / "x.npz") as arrays:
        labels = arrays["labels"][arrays["split"] == "test"]
    one, two = (per_query(vectors_of_tested(run), labels).recall1 for run in runs)
    expected = paired_difference(two, one, labels)
    assert (found["mean"], *found["over_classes"]) == pytest.approx(tuple(expected))
    assert found["verdict"] == "above"
    assert found["over_seeds"] is None
    code, out, _ = compare(capsys, *reversed(runs))
    assert code == 0
    assert "below" in out


@pytest.mark.slow
def test_seeds_are_one_method(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [home / f"{name}-{seed}" for name in ("untrained", "trained") for seed in (0, 1)]
    code, out, err = compare(capsys, *runs, "--json")
    assert code == 0, err
    methods = json.loads(out)["methods"]
    assert [len(method["runs"]) for method in methods] == [2, 2]
    assert methods[1]["recall@1"]["difference"]["over_seeds"] is not None
    assert "head auto" in methods[1]["name"]


@pytest.mark.slow
def test_seeds_are_paired_by_number(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def over_seeds(*names: str) -> list[float]:
        code, out, err = compare(capsys, *(home / name for name in names), "--json")
        assert code == 0, err
        found = json.loads(out)["methods"][1]["recall@1"]["difference"]
        assert found["paired_seeds"] == [0, 1]
        return found["over_seeds"]

    first = over_seeds("untrained-0", "untrained-1", "trained-0", "trained-1")
    assert over_seeds("untrained-0", "untrained-1", "trained-1", "trained-0") == first
    code, out, _ = compare(
        capsys, *(home / f"{n}-{s}" for n, s in (("untrained", 0), ("trained", 1)))
    )
    assert code == 0
    assert "does not account for the seed" in out


@pytest.mark.slow
def test_runs_scored_by_folds(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The usual run on photographs or vectors keeps no class out; its folds are compared."""
    runs = home / "other-untrained", home / "other"
    code, out, err = compare(capsys, *runs, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["queries"] == 192
    scores = [json.loads((run / "scores.json").read_text()) for run in runs]
    for score in ("recall@1", "map@r"):
        means = [method[score]["mean"] for method in answer["methods"]]
        assert means == pytest.approx([s[score] for s in scores])
        gap = answer["methods"][1][score]["difference"]
        assert gap["mean"] == pytest.approx(means[1] - means[0])
        assert gap["over_classes"][0] <= gap["mean"] <= gap["over_classes"][1]


@pytest.mark.slow
def test_folds_that_differ_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "other", home / "other-3")
    stored = read_json(home / "other-3" / "choice.json")
    stored["scores"]["folds"] = 3
    write_json(home / "other-3" / "choice.json", stored)
    code, _, err = compare(capsys, home / "other", home / "other-3")
    assert code == 2
    assert "scored by other folds" in err


@pytest.mark.slow
def test_indistinguishable_is_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "trained-0", home / "copy")
    code, out, err = compare(capsys, home / "trained-0", home / "copy")
    assert code == 0, err
    assert out.count("indistinguishable") == 2  # in Recall@1 and in MAP@R


@pytest.mark.slow
def test_other_data(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (home / "other", home / "trained-0", "--data", home / "free.npz", "--json")
    code, out, err = compare(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["queries"] == 192
    assert f"{home / 'trained-0'} was trained on classes of the same names as 12 of these 24" in err
    assert f"{home / 'other'} was trained on classes of the same names as 24 of these 24" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["trained-0"], "give two or more"),
        (["trained-0", "trained-1"], "differ in their seed alone"),
        (["trained-0", "other"], "was tested on other items"),
        (["trained-0", "nowhere"], "nowhere"),
    ],
)
def test_refusals(
    names: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = compare(capsys, *(home / name for name in names))
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_methods_whose_first_settings_agree_are_not_one(tmp_path: Path) -> None:
    """Groups are named by three settings that differ; two may agree in those."""

    def run(name: str, **settings: object) -> Run:
        return Run(tmp_path / name, replace(settings_of(), **settings))  # type: ignore[arg-type]

    other = {"preset": "small", "loss": "nca", "scale": 3.0, "backbone": "convnet"}
    runs = [
        *(run(f"a{seed}", seed=seed, loss="nca", epochs=3) for seed in (0, 1)),
        *(run(f"b{seed}", seed=seed, loss="nca", epochs=9) for seed in (0, 1)),
        *(run(f"c{seed}", seed=seed, dim=8, **other) for seed in (0, 1)),
    ]
    assert sorted(_same_but_for_the_seed(runs).values()) == [[0, 1], [2, 3], [4, 5]]


def test_where_curves_were_written_makes_no_method(tmp_path: Path) -> None:
    runs = [Run(tmp_path, settings_of(seed=s, tensorboard=tmp_path / str(s))) for s in (0, 1)]
    assert list(_same_but_for_the_seed(runs).values()) == [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--extended"], ["--k", "5"], ["--seed", "1"], ["--rerank", "none"]]
)
def test_scores_of_folds_are_not_computed_again(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["evaluate", str(home / "other"), *words]) == 2
    assert "need DATA that it has not seen" in capsys.readouterr().err


def test_seeds_that_only_one_method_has_are_not_in_the_difference() -> None:
    """One training of the first went wrong, with a seed that the other was not trained with."""
    labels = np.repeat(np.arange(30), 10)

    def scores(hits: int) -> torch.Tensor:
        return (torch.arange(300) * 7 % 300 < hits).double()

    first = {0: scores(180), 1: scores(180), 7: scores(60)}
    found = _difference({0: scores(174), 1: scores(175)}, first, labels, largest=None)
    assert found["mean"] == pytest.approx((174.5 - 180) / 300)
    for low, high in (found["over_seeds"], found["over_classes"]):
        assert low < found["mean"] < high
