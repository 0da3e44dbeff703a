"""The command as a user meets it: refused, killed and stopped, in two processes, on a small CUB."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.cli import main
from nofuss.paper.reproduce import FIGURES, choose
from nofuss.paper.sources import find_folders

CLASSES, ITEMS = 12, 6


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
        [*command, "--out", str(out), "--seeds", "1"],
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
    data = ("--data", str(home / "data"))
    for words, named, not_named in (
        (("cub", "cars"), ("images.txt", "cars_annos.mat"), "Ebay"),
        (("products", *data), ("Ebay_train.txt", "Ebay_test.txt"), "CUB"),
        (("--data", str(tmp_path)), ("CUB", "Cars196", "Products"), "characters"),
    ):
        assert main(["reproduce", *words, "--out", str(tmp_path / "a")]) == 2
        said = capsys.readouterr().err
        assert all(name in said for name in named)
        assert not_named not in said
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
        (["characters", "--seeds", "0"], "--seeds"),
        (["characters", "--weights", "x.pth"], "--budget paper"),
        (["characters", "--out", "full"], "full"),
        pytest.param(
            ["characters", "--out", "full/report.html"], "report.html", marks=pytest.mark.slow
        ),
        (["convergenc"], "'convergence'"),
        (["--data", "nowhere"], "nowhere"),
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
    assert main(["reproduce", *flags]) in (1, 2)
    assert said in capsys.readouterr().err
    assert (tmp_path / "full" / "report.html").read_text() == "mine"


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
