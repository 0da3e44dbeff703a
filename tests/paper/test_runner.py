"""Rates and kept results; the command as a user meets it: killed and stopped, on a small CUB."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nofuss.cli import main
from nofuss.paper.published import NAMES
from nofuss.paper.reproduce import FIGURES, choose
from nofuss.paper.runner import Choice, Runner, choose_rate
from nofuss.paper.sources import Source, find_folders
from nofuss.paper.trials import run_trial, trial_of
from tests.paper.tiny_source import vectors

CLASSES, ITEMS = 12, 6


def test_the_choice_of_rates_never_sees_test_classes(source: Source, tmp_path: Path) -> None:
    """Spoilt test items change nothing: neither the rates nor a single score."""
    spoilt = vectors()
    assert spoilt.array is not None
    spoilt.array[source.test_rows] = np.nan
    features = torch.from_numpy(spoilt.array)
    other = replace(source, collection=spoilt, features=features, fingerprint="spoilt")
    runner, on_spoilt = Runner(source, tmp_path), Runner(other, tmp_path)
    assert [runner.rate(loss) for loss in NAMES] == [on_spoilt.rate(loss) for loss in NAMES]
    assert runner.choices == on_spoilt.choices


def test_every_method_has_as_many_tries(source: Source, tmp_path: Path) -> None:
    for loss in NAMES:
        trials = [t for lr in source.budget.rates for t in Runner(source, tmp_path).tries(loss, lr)]
        assert len(set(trials)) == 4
        for trial in trials:
            train, held_out = source.split(trial.fold)
            assert set(source.labels(train)).isdisjoint(source.labels(held_out))
            assert not set(held_out) & set(source.test_rows)


def test_tries_that_collapse_are_not_chosen() -> None:
    """The higher rate scores more but collapsed in one half; if all do, the best is taken."""
    sound, flat = ({"spread": spread, "spread_before": 0.4} for spread in (0.5, 0.009))
    low, high, half = ([{"recall@1": r, **s}] for r, s in ((0.5, sound), (0.6, sound), (0.6, flat)))
    assert choose_rate({1.0: low, 2.0: high}) == Choice(2.0, {1.0: 0.5, 2.0: 0.6}, [])
    choice = choose_rate({1.0: low, 2.0: high + half})
    assert (choice.chosen, choice.collapsed) == (1.0, [2.0])
    choice = choose_rate({1.0: [{**low[0], **flat}], 2.0: half})
    assert (choice.chosen, choice.collapsed) == (2.0, [1.0, 2.0])


def test_a_trial_is_the_same_twice_and_kept(source: Source, tmp_path: Path) -> None:
    trial = trial_of(source, "lifted", 1e-3, seed=1, record="curve")
    first = run_trial(source, trial)
    assert [row["step"] for row in first["curve"]] == [0, 4, 8]
    assert first["curve"][-1]["recall@1"] == first["recall@1"]
    assert sum(first["hits"]) / sum(first["queries"]) == pytest.approx(first["recall@1"])
    (again,) = Runner(source, tmp_path).run({"": [trial]})[""]
    for key in ("recall@1", "recall@8", "nmi", "hits", "spread"):
        assert first[key] == again[key]
    stopped = Runner(source, tmp_path, stop=lambda: True)  # would stop at the first step
    assert stopped.run({"": [trial]}) == {"": [again]}
    file = tmp_path / f"{trial.key(source)}.json"
    assert [*tmp_path.iterdir()] == [file]
    file.write_bytes(file.read_bytes()[:40])  # a damaged file is done again
    with pytest.warns(UserWarning, match="is damaged"):
        (third,) = Runner(source, tmp_path).run({"": [trial]})[""]
    assert third["hits"] == first["hits"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/CUB_200_2011 in the official layout, with coloured noise for birds; and a cache."""
    home = tmp_path_factory.mktemp("home")
    folder, random = home / "data" / "CUB_200_2011", np.random.default_rng(0)
    images, labels = [], []
    for c in range(CLASSES):
        base = random.integers(0, 256, 3)
        (folder / "images" / f"{c}").mkdir(parents=True)
        for i in range(ITEMS):
            pixels = (base + random.integers(-90, 90, (32, 32, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{c}" / f"{i}.png")
            images.append(f"{len(images) + 1} {c}/{i}.png\n")
            labels.append(f"{len(labels) + 1} {c + 1}\n")
    (folder / "images.txt").write_text("".join(images))
    (folder / "image_class_labels.txt").write_text("".join(labels))
    return home


def start(home: Path, out: Path, *names: str) -> subprocess.Popen[str]:
    """Nofuss reproduce, as a process of its own."""
    command = [sys.executable, "-m", "nofuss", "reproduce", *names, "--data", str(home / "data")]
    return subprocess.Popen(
        [*command, "--out", str(out), "--seeds", "2"],
        env=os.environ | {"NOFUSS_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def entries(out: Path) -> list[dict[str, object]]:
    """What results.json says, without what time it took and what was typed."""
    found = json.loads((out / "results.json").read_text())["entries"]
    return [
        {k: e[k] for k in ("name", "values", "rates", "verdict", "sentence", "seeds")}
        for e in found
    ]


def wait_for_files(folder: Path, count: int, process: subprocess.Popen[str]) -> list[Path]:
    """Until some results are kept; the process must still be at work then."""
    while len(done := list(folder.glob("[!.]*.json"))) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return done


@pytest.mark.slow
def test_killed_and_stopped_it_goes_on_to_the_same_results(home: Path, tmp_path: Path) -> None:
    names, out = ("retrieval",), tmp_path / "broken"
    process = start(home, out, *names)
    wait_for_files(out / "work", 2, process)
    process.kill()
    process.communicate()
    kept = {file: file.stat().st_mtime_ns for file in (out / "work").glob("[!.]*.json")}
    process = start(home, out, *names)
    wait_for_files(out / "work", len(kept) + 2, process)
    process.send_signal(signal.SIGINT)
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert "the same command resumes" in words
    process = start(home, out, *names)
    words, _ = process.communicate(timeout=120)
    assert process.returncode == 0, words
    for file, when in kept.items():
        assert file.stat().st_mtime_ns == when, "done again although it was kept"
    whole = start(home, tmp_path / "whole", *names)
    words, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, words
    assert "cars: " not in words, "only what was asked for is missed"
    assert entries(out) == entries(tmp_path / "whole")
    page = (out / "report.html").read_text()
    assert "data:image/" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_missing_data_sets_are_named_with_their_layout(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "cub", "cars", "--out", str(tmp_path / "a")]) == 2
    words = capsys.readouterr().err
    assert "CUB-200-2011 needs --data" in words
    assert "images.txt, image_class_labels.txt" in words
    assert "cars_annos.mat" in words
    data = ["--data", str(home / "data"), "--out", str(tmp_path / "a")]
    assert main(["reproduce", "products", *data]) == 2
    words = capsys.readouterr().err
    assert "has no Stanford Online Products" in words
    assert "Ebay_train.txt, Ebay_test.txt" in words
    assert "CUB" not in words
    assert main(["reproduce", "--data", str(tmp_path)]) == 2
    words = capsys.readouterr().err
    assert [line for line in words.splitlines() if "official layout" in line].__len__() == 3
    assert not (tmp_path / "a").exists()


def test_what_can_be_done_is_done(home: Path) -> None:
    folder = home / "data" / "CUB_200_2011"
    for data in (home / "data", folder):
        found = find_folders(data)
        assert found == {"cub": folder}
        chosen = choose((), found, data)
        assert chosen == [("cub", "cub"), *((name, "cub") for name in FIGURES)]
        assert choose(("characters", "bounds"), found, data) == [
            ("characters", "characters"),
            ("bounds", "cub"),
        ]
    assert {source for _, source in choose((), {}, None)} == {"characters"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seeds", "0"], "expected 1 or more"),
        (["--weights", "x.pth"], "is for --budget paper"),
        (["--out", "full"], "holds other files"),
    ],
)
def test_refused_before_anything_is_done(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "report.html").write_text("mine")
    assert main(["reproduce", "characters", *flags]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "full" / "report.html").read_text() == "mine"


def test_unknown_names_and_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "convergenc"]) == 2
    assert "did you mean 'convergence'?" in capsys.readouterr().err
    assert main(["reproduce", "--data", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_products_takes_the_folder_or_the_characters_of_its_size(tmp_path: Path) -> None:
    def pairs(*names: str, data: Path | None = None) -> list[tuple[str, str]]:
        found = {} if data is None or data == Path("han") else {"products": data}
        return choose(names, found, data)

    assert pairs("products") == [("products", "han"), ("convergence", "han")]
    assert pairs("products", data=Path("han")) == pairs("products")
    folder = pairs("products", "convergence", data=tmp_path)
    assert folder == [("products", "products"), ("convergence", "products")]
    assert pairs("bounds") == [("bounds", "characters")]
    assert pairs("bounds", data=Path("han")) == [("bounds", "han")]
    assert pairs(data=Path("han"))[:2] == pairs("products")
    assert {source for _, source in pairs(data=Path("han"))} == {"han"}


@pytest.mark.torchrun
def test_two_processes_find_what_one_finds(home: Path, tmp_path: Path) -> None:
    found = []
    for count, name in ((1, "one"), (2, "two")):
        several = [] if count == 1 else ["torch.distributed.run", f"--nproc-per-node={count}", "-m"]
        command = [sys.executable, "-m", *several, "nofuss", "reproduce", "bounds"]
        done = subprocess.run(
            [*command, "--data", home / "data", "--out", tmp_path / name, "--seeds", "1"],
            env=os.environ | {"NOFUSS_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("report: ") == 1, "one process speaks"
        (entry,) = json.loads((tmp_path / name / "results.json").read_text())["entries"]
        found.append(entry)
    one, two = found
    for loss, row in one["rates"].items():
        assert two["rates"][loss]["tried"] == pytest.approx(row["tried"], abs=0.06)
    assert two["values"]["epsilon"] == pytest.approx(one["values"]["epsilon"], rel=1e-2)
