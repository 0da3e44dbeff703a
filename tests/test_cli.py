"""The commands as a user meets them: real processes, real signals, real files."""

import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save

from nofuss import __version__
from nofuss.cli import COMMANDS, main, parse
from nofuss.config import Options
from nofuss.data.open import open_data
from nofuss.model.saved import model_files
from tests.running import command, every_step, started

SLOW_ENOUGH = ("--epochs", "8", "--batch-size", "16", "--dim", "8")
"""About forty steps, each with a checkpoint: time to be killed in."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every kind, and the cache."""
    home, r = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    means = r.normal(size=(12, 20))
    vectors = means[:, None] + 0.3 * r.normal(size=(12, 6, 20))
    np.savez(
        home / "vectors.npz",
        vectors=vectors.reshape(-1, 20).astype(np.float32),
        labels=np.repeat(np.arange(12), 6),
    )
    drawn = r.integers(0, 256, (20, 20, 20))
    images = drawn[:, None] + r.integers(-40, 40, (20, 8, 20, 20))
    np.savez(
        home / "images.npz",
        images=images.reshape(-1, 20, 20).clip(0, 255).astype(np.uint8),
        labels=np.repeat(np.arange(20), 8),
    )
    rows = ["anchor,positive,negative"]
    for c in range(8):
        (home / "photos" / f"class {c}").mkdir(parents=True)
        base = r.integers(0, 256, (24, 24, 3))
        for i in range(4):
            pixels = (base + r.integers(-30, 30, base.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(home / "photos" / f"class {c}" / f"{i}.png")
            near, far = f"class {c}/{(i + 1) % 4}.png", f"class {(c + 1) % 8}/{i}.png"
            rows.append(f"photos/class {c}/{i}.png,photos/{near},photos/{far}")
    (home / "triplets.csv").write_text("\n".join(rows))
    return home


@pytest.fixture(scope="module")
def photo_run(home: Path) -> Path:
    """A run on the photos that several tests read."""
    assert main(["train", str(home / "photos"), "--out", str(home / "run"), "--epochs", "1"]) == 0
    return home / "run"


@pytest.fixture(autouse=True)
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty directory, on one thread: the bits of a sum depend on how it is shared out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOFUSS_CACHE", str(home / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "100")
    threads, term = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, term)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Call:
    """The program within this process: for all that needs no process of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        self.capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Outcome(code, *self.capsys.readouterr())


@pytest.fixture
def nofuss(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


def process(*arguments: object) -> Outcome:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def one_line(outcome: Outcome, code: int) -> str:
    assert outcome.code == code, outcome
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert "unexpected" not in outcome.err
    assert lines[0].startswith("nofuss: ")
    return lines[0]


def final(run: Path) -> dict[str, bytes]:
    """Weights, and proxies and optimizer state at the end."""
    newest = max((run / "checkpoints").iterdir(), key=lambda p: int(p.stem[5:]))
    return {
        "model": model_files(run / "model")[1].read_bytes(),
        newest.name: save(load_file(newest)),
    }


# Words


def test_help_and_parsing_without_torch() -> None:
    script = """
import sys
import nofuss
assert "torch" not in sys.modules
from nofuss.cli import main, parse
parse(["train", "photos", "--epochs", "3"])
assert main(["--help"]) == 0
loaded = {m for m in sys.modules if m.startswith("nofuss.commands.")}
assert loaded == {"nofuss.commands.train", "nofuss.commands.console"}, loaded
assert main(["train", "--help"]) == main(["serve", "--help"]) == 0
assert main(["train", "--nonsense"]) == main([]) == 2
heavy = {"torch", "numpy", "sklearn", "PIL", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--loss" in done.stdout
    assert "│ train " in done.stderr  # of no words at all


def test_ctrl_c_while_the_program_is_loaded_shows_no_traceback() -> None:
    script = """
import sys
class Stopped:
    def find_spec(self, name, *_):
        if name == "nofuss.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stopped())
from nofuss.__main__ import program
program()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian x", "'train'"),
        ("train {home}/vectors.npz --loss proxynca", "'proxy-nca'"),
        ("train {home}/photos --backbone identity", "--backbone"),
        ("train {home}/photos --weights x.pt", "x.pt"),
        ("train {home}/vectors.npz --resume", "--out"),
        ("train --resume --out {home}", "{home}"),
        ("evaluate {home}/none", "{home}/none"),
        ("embed {home} {home}/photos --out x.txt", ".safetensors"),
        ("embed {home} {home}/photos --out {home}/vectors.npz", "vectors.npz"),
        ("embed {home} {home}/photos --out no/x.npz", "folder no"),
    ],
)
def test_refusals(words: str, said: str, nofuss: Call, home: Path, tmp_path: Path) -> None:
    outcome = nofuss(*words.format(home=home).split())
    assert said.format(home=home) in one_line(outcome, 2)
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --bacth-size 3", "--batch-size"),
        ("train --epochs 2.5", "--epochs is 2.5"),
        ("train --epochs many", "--epochs"),
        ("train --preset papr", "paper"),
        ("train photos more", "more"),
        ("train --epochs 1 --epochs 2", "--epochs"),
        ("evaluate run --k 1 2.5", "--k is 2.5"),
        ("search run", "PICTURE"),
        ("embed run data", "--out"),
        ("train --\x1b[2J", "--\\x1b[2J"),
    ],
)
def test_words_that_can_not_be_parsed(words: str, said: str, nofuss: Call) -> None:
    line = one_line(nofuss(*words.split()), 2)
    assert said in line
    assert line.isprintable()


def test_version_and_no_words(nofuss: Call) -> None:
    assert nofuss("--version").out == f"nofuss {__version__}\n"
    nothing = nofuss()
    assert (nothing.code, nothing.out) == (2, "")
    assert all(f"│ {name} " in nothing.err for name in COMMANDS)
    assert "--debug" in nothing.err


def setting(*words: str) -> dict[str, Any]:
    """What a command line of `nofuss train` asks for, but for its data."""
    name, call = parse(["train", *words])
    assert name == "train"
    options: Options = call.keywords.get("options", Options())
    return options.asked()


def test_a_setting_is_given_even_with_its_default() -> None:
    """A resumed run must know what was said: `--seed 0` is not the same as no word of it."""
    assert setting() == {}
    given = setting("photos", "--seed", "0", "--out=run", "--preset", "auto")
    assert given == {"seed": 0, "out": Path("run")}  # auto leaves it open


def test_a_switch_is_on_off_or_not_given() -> None:
    assert setting("--no-mirror") == {"mirror": False}
    assert setting("--mirror", "--free-norms") == {"mirror": True, "free_norms": True}
    assert setting("--no-freeze-batch-norm", "--seed", "3")["freeze_batch_norm"] is False
    assert setting("--resume") == {"resume": True}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_pages(name: str, nofuss: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = nofuss(name, "--help")
    assert page.code == 0
    assert page.out.startswith(f"Usage: nofuss {name}")
    assert max(map(len, page.out.splitlines())) <= 80
    assert "None" not in page.out
    assert "False" not in page.out
    assert "\x1b" not in page.out  # piped: no colours


def test_settings_come_in_three_groups(nofuss: Call) -> None:
    page = nofuss("train", "--help").out
    flags = ["─ Common options", "--out RUN", "─ Further options", "--batch-size N"]
    flags += ["─ Options of the paper and its experiments", "--scale X"]
    places = [page.index(flag) for flag in flags]
    assert places == sorted(places)
    for field in dataclasses.fields(Options):
        is_flag = field.name not in ("data", "start")  # an argument, and for the experiments alone
        assert (f" --{field.name.replace('_', '-')} " in page) == is_flag, field.name


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_waiting_threads_sleep_unless_told_otherwise(own: str | None, tmp_path: Path) -> None:
    """As torch's own library of threads says when it is loaded by a real command."""
    if sys.platform != "linux":
        pytest.skip("another library than GNU's")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": own} if own else {})
    done = subprocess.run(
        command("evaluate", tmp_path), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"OMP_WAIT_POLICY = '{own or 'PASSIVE'}'" in done.stderr


def test_debug_shows_the_traceback_and_keeps_the_exit_code(nofuss: Call) -> None:
    done = nofuss("train", "none", "--debug")
    assert done.code == nofuss("train", "none").code == 2
    assert "Traceback" in done.err


# From data to scores


@pytest.mark.slow
def test_vectors_end_to_end(nofuss: Call, home: Path) -> None:
    done = process("train", home / "vectors.npz", "--out", "run", "--epochs", 3)
    assert done.code == 0, done.err
    assert "12 classes, 72 vectors of 20 dimensions" in done.out
    assert done.err == ""
    run = Path("run")
    scores = json.loads((run / "scores.json").read_text())
    assert scores["recall@1"] > 0.9
    assert scores["classes"] == 12  # each by a model that has not seen it
    assert scores["folds"] == 4
    data = json.loads((run / "data.json").read_text())
    assert {side: len(names) for side, names in data["classes"].items()} == {"train": 12}
    assert len(json.loads((run / "model" / "model.json").read_text())["class_names"]) == 12
    assert (run / "report.html").is_file()
    again = nofuss("train", home / "vectors.npz", "--out", "run", "--epochs", 3)
    assert "run" in one_line(again, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_is_scored_from_anywhere_with_any_k(
    nofuss: Call, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    run = tmp_path / "run"
    words = ("--epochs", 1, "--dim", 4, "--test-fraction", 0.5)
    assert nofuss("train", "vectors.npz", "--out", run, *words).code == 0
    monkeypatch.chdir(tmp_path)  # from where vectors.npz is not to be seen
    assert nofuss("evaluate", run, "--k", 3).code == 0
    kept = json.loads((run / "scores.json").read_text())
    assert {"recall@1", "recall@3", "recall@8"} <= kept.keys()
    assert "as nearest neighbour" in (run / "report.html").read_text()
    (run / "scores.json").write_text("{")  # a warning must not get into what a program reads
    scores = nofuss("evaluate", run, "--json")
    assert scores.out.startswith("{"), scores
    assert json.loads(scores.out)["recall@1"] == kept["recall@1"]
    assert "damaged" in scores.err


@pytest.mark.slow
def test_untrained_features_are_a_run_like_any_other(nofuss: Call, home: Path) -> None:
    """With the scores that stand beside every trained run."""
    words = ("train", home / "vectors.npz", "--test-fraction", 0.5, "--out")
    assert nofuss(*words, "whole", "--head", "untrained").code == 0
    scores = json.loads(Path("whole/scores.json").read_text())
    beside = scores["baselines"]["untrained features, 20-d"]
    assert (scores["recall@1"], scores["map@r"]) == (beside["recall@1"], beside["map@r"])
    assert scores["method"] == "untrained features"
    gain, low, high = scores["gain"]["recall@1"]
    assert gain == 0
    assert low == -high
    assert nofuss(*words, "few", "--head", "untrained", "--dim", 4).code == 0
    scores = json.loads(Path("few/scores.json").read_text())
    assert scores["map@r"] == pytest.approx(scores["baselines"]["their PCA, 4-d"]["map@r"])


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--epochs 2 --dim 4", "--test-fraction 0.5"])
def test_a_run_that_ended_before_its_report_resumes_to_the_same_bits(
    flags: str, nofuss: Call, home: Path
) -> None:
    """Killed after training, whatever had been written by then: all of it is found again."""
    assert nofuss("train", home / "vectors.npz", "--out", "run", *flags.split()).code == 0
    run = Path("run")
    names = ("model/model.json", "choice.json", "scores.json")
    whole = {name: (run / name).read_bytes() for name in names}
    weights = model_files(run / "model")[1].read_bytes()
    for lost in (["report.html", "scores.json", "choice.json"], None):
        if lost is None:
            (run / "report.html").unlink()
            shutil.rmtree(run / "model")
            (run / "choice.json").write_text("{")  # cut off
        for name in lost or ():
            (run / name).unlink()
        resumed = nofuss("train", "--out", "run", "--resume")
        assert resumed.code == 0, resumed.err
        assert "nothing is left to do" not in resumed.out
        assert {name: (run / name).read_bytes() for name in names} == whole
        assert model_files(run / "model")[1].read_bytes() == weights
        assert (run / "report.html").is_file()


@pytest.mark.slow
def test_pictures_end_to_end(nofuss: Call, home: Path, tmp_path: Path) -> None:
    """With files among them that can't be read, and that stay as they are."""
    photos = tmp_path / "photos"
    shutil.copytree(home / "photos", photos)
    (photos / "class 0" / "broken.png").write_bytes(b"no picture")
    (photos / "class 1" / "empty.jpg").write_bytes(b"")
    cut = (photos / "class 2" / "0.png").read_bytes()
    (photos / "class 2" / "cut.png").write_bytes(cut[: len(cut) // 2])
    before = {p: p.read_bytes() for p in photos.rglob("*.*")}
    outcome = nofuss("train", photos, "--out", "run", "--epochs", 2)
    assert outcome.code == 0, outcome.err
    assert "class 0/broken.png (not a picture); class 1/empty.jpg" in outcome.out
    listed = Path("run/scan.csv").read_text()
    assert all(name in listed for name in ("broken.png", "empty.jpg", "cut.png"))
    assert len(listed.splitlines()) == 4
    assert {p: p.read_bytes() for p in photos.rglob("*.*")} == before
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in metrics] == [1, 2]

    first = json.loads(Path("run/scores.json").read_text())
    outcome = nofuss("evaluate", "run", "--json", "--k", 1, 3)
    assert outcome.code == 0, outcome.err
    scores = json.loads(outcome.out)
    assert scores["recall@1"] == pytest.approx(first["recall@1"])
    assert {"recall@1", "recall@3", "map@r", "nmi"} <= scores.keys()
    outcome = nofuss("evaluate", "run", photos)
    assert "Recall@1" in outcome.out
    assert "8 classes" in outcome.out


@pytest.mark.slow
def test_labels_in_file_names_and_in_shards(nofuss: Call, home: Path, tmp_path: Path) -> None:
    """Trained, scored, indexed and searched without a class folder; the run knows how."""
    (tmp_path / "flat").mkdir()
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for picture in sorted((home / "photos").rglob("*.png")):
            number = picture.parent.name.removeprefix("class ")
            shutil.copy(picture, tmp_path / "flat" / f"bird{number}-{picture.name}")
            shard.add(picture, f"{number}{picture.stem}.png")
            label = tarfile.TarInfo(f"{number}{picture.stem}.cls")
            label.size = 5
            shard.addfile(label, io.BytesIO(f"bird{number}".encode()))
    same = []
    for data, flags in (("flat", ("--label-pattern", "^(.+)-")), ("shard.tar", ())):
        run = Path(f"run-{data}")
        outcome = nofuss("train", data, "--out", run, "--epochs", 1, "--dim", 8, *flags)
        assert outcome.code == 0, outcome.err
        outcome = nofuss("evaluate", run, "--json")
        assert outcome.code == 0, outcome.err
        same.append(json.loads(outcome.out)["recall@1"])
        assert nofuss("index", run, data).code == 0
        found = nofuss("search", run, "flat/bird3-0.png", "-k", 1, "--json")
        (nearest,) = json.loads(found.out)["queries"][0]["neighbours"]
        assert nearest["label"] == "bird3"
        assert nearest["distance"] == pytest.approx(0, abs=1e-3)
        assert nofuss("embed", run, data, "--out", f"{data}.npz").code == 0
        with np.load(f"{data}.npz") as embedded:
            assert embedded["classes"].tolist() == [f"bird{c}" for c in range(8)]
    assert same[0] == same[1]
    refused = nofuss("train", "shard.tar", "--out", "no", "--class-level", 1)
    assert "--class-level" in one_line(refused, 2)


@pytest.mark.slow
def test_queries_search_a_gallery(
    nofuss: Call, home: Path, photo_run: Path, tmp_path: Path
) -> None:
    """As folders, as one CSV that says who is what, and with the queries in the gallery."""
    photos, before = home / "photos", (photo_run / "scores.json").read_bytes()
    pictures = sorted(photos.rglob("*.png"))
    rows = [(p, "query" if p.stem in "02" else "gallery") for p in pictures]
    lines = [f"{p},{p.parent.name},{side}" for p, side in rows]
    (tmp_path / "both.csv").write_text("\n".join(["path,label,split", *lines]))
    for name in ("query", "gallery"):
        own = [line.rpartition(",")[0] for line in lines if line.endswith(name)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,label", *own]))

    def scores(*words: object) -> dict[str, Any]:
        outcome = nofuss("evaluate", photo_run, *words, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    apart = scores(tmp_path / "query.csv", "--gallery", tmp_path / "gallery.csv", "--extended")
    assert apart["queries"] == sum(side == "query" for _, side in rows)
    assert apart["items"] == len(rows)
    assert {"mrr", "map", "precision@8", "class_mean_recall@1", "class_mean_map"} <= apart.keys()
    one_file = scores(tmp_path / "both.csv")
    assert one_file == {key: apart[key] for key in one_file}
    # A gallery that holds all of the queries is all against all, whatever it is given as.
    among_themselves = scores(photos)
    inside = scores(photos, "--gallery", photos)
    held = scores(tmp_path / "query.csv", "--gallery", photos)
    assert inside["recall@1"] == among_themselves["recall@1"]
    assert held["queries"] == apart["queries"]
    assert held["items"] == len(rows)
    assert (photo_run / "scores.json").read_bytes() == before
    outcome = nofuss("evaluate", photo_run, photos, "--gallery", photos, "--extended")
    assert "Recall@1, mean over classes" in outcome.out

    words = ("evaluate", photo_run, tmp_path / "other.csv", "--gallery")
    for label, gallery in (("elsewhere", tmp_path / "gallery.csv"), ("class 7", photos)):
        (tmp_path / "other.csv").write_text(f"path,label\n{pictures[0]},{label}\n")
        assert "class" in one_line(nofuss(*words, gallery), 2)
    assert "queries" in one_line(nofuss("evaluate", photo_run, "--gallery", photos), 2)


@pytest.mark.slow
def test_embed_writes_what_train_reads(nofuss: Call, home: Path, photo_run: Path) -> None:
    embed = ("embed", photo_run, home / "photos", "--out")
    assert nofuss(*embed, "e.npz").code == 0
    assert nofuss(*embed, "e.safetensors").code == 0
    with np.load("e.npz") as file:
        arrays = dict(file)
    assert arrays["vectors"].shape == (32, 64)
    np.testing.assert_allclose(np.linalg.norm(arrays["vectors"], axis=1), 1, rtol=1e-5)
    assert arrays["names"][0] == "class 0/0.png"
    assert arrays["classes"].tolist() == [f"class {c}" for c in range(8)]
    twin = load_file("e.safetensors")
    assert np.array_equal(twin["vectors"], arrays["vectors"])
    assert np.array_equal(twin["labels"], arrays["labels"])
    assert open_data("e.safetensors").class_names == open_data("e.npz").class_names
    assert "e.npz" in one_line(nofuss(*embed, "e.npz"), 2)
    # Pictures without class folders embed too, to the same vectors.
    assert nofuss("embed", photo_run, home / "photos" / "class 3", "--out", "flat.npz").code == 0
    with np.load("flat.npz") as flat:
        np.testing.assert_allclose(flat["vectors"], arrays["vectors"][12:16], atol=1e-5)
    # Beside class folders they are left out, and named: among the labels, −1 would be a class.
    shutil.copytree(home / "photos" / "class 3", "some/class 3")
    shutil.copy("some/class 3/0.png", "some/loose.png")
    outcome = nofuss("embed", photo_run, "some", "--out", "some.npz")
    assert outcome.code == 0
    assert "1 items without a class skipped: loose.png" in outcome.out
    with np.load("some.npz") as some:
        assert some["labels"].tolist() == [0] * 4
    refused = nofuss("embed", photo_run, home / "vectors.npz", "--out", "v.npz")
    assert "pictures" in one_line(refused, 2)
    assert nofuss("train", "e.npz", "--out", "second").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--batch-size 1000 --test-fraction 0 --dim 500 --loss n-pairs --per-class 3",
        "--batch-size 1 --test-fraction 0.01 --assignment matched --proxies-per-class 2",
        "--test-fraction 0.5 --free-norms --optimizer rmsprop --schedule ramp",
    ],
)
def test_odd_settings_that_work(flags: str, nofuss: Call, home: Path) -> None:
    words = ("train", home / "vectors.npz", "--out", "run", "--epochs", 1)
    outcome = nofuss(*words, *flags.split())
    assert outcome.code == 0, outcome.err
    assert np.isfinite(load_file(model_files(Path("run/model"))[1])["head.weight"]).all()


# Interruptions


@pytest.mark.slow
def test_killed_damaged_stopped_and_resumed_it_ends_with_the_same_bits(
    nofuss: Call, home: Path
) -> None:
    """SIGKILL at a random moment, the newest checkpoint damaged on top of it, then SIGTERM.

    Full disks, and many more kills: torture/.
    """
    first = ("train", home / "images.npz", "--out", "run", *SLOW_ENOUGH)
    running = started(every_step(*first), after="epoch   2")
    time.sleep(random.Random(time.time_ns()).uniform(0, 0.4))
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not Path("run/model").exists()
    checkpoints = sorted(Path("run/checkpoints").glob("step-*"), key=lambda p: int(p.stem[5:]))
    damaged = bytearray(checkpoints[-1].read_bytes())
    damaged[-5] ^= 1
    checkpoints[-1].write_bytes(damaged)

    running = started(every_step("train", "--out", "run", "--resume"), after="resuming at")
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 130, said
    assert "nofuss train --out run --resume" in said
    assert "Traceback" not in said
    outcome = nofuss("train", "--out", "run", "--resume")
    assert outcome.code == 0, outcome.err
    assert "resuming at epoch" in outcome.out
    assert nofuss(*first[:2], "--out", "whole", *SLOW_ENOUGH).code == 0
    assert final(Path("run")) == final(Path("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "flags", "code", "said"),
    [
        ([3], "", 2, "class"),
        ([3, 3], "", 0, "learns from all 2 classes"),
        ([3, 3, 3], "", 0, "learns from all 3 classes"),
        ([3, 3], "--test-fraction 0.5", 2, "add classes, or lower --test-fraction"),
        ([3, 3], "--test-fraction 0", 0, "nothing is held out"),
        ([1, 1, 1, 1], "", 0, "too few to score"),
        ([1, 5, 1, 5], "", 0, "run directory"),
        ([2, 2, 2], "--test-fraction 0.3", 0, "too few to score"),
        ([2, 2, 2, 2], "--loss semi-hard", 0, "Recall@1"),
    ],
)
def test_few_classes_and_items(
    sizes: list[int], flags: str, code: int, said: str, nofuss: Call
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    r = np.random.default_rng(0)
    images = r.integers(0, 256, (len(labels), 7, 9), dtype=np.uint8)  # tiny, too
    np.savez("x.npz", images=images, labels=labels)
    outcome = nofuss("train", "x.npz", "--out", "run", "--epochs", 1, *flags.split())
    assert outcome.code == code, outcome
    assert said in outcome.out + outcome.err
    if code:
        one_line(outcome, code)


@pytest.mark.slow
def test_pairs_end_to_end(nofuss: Call, home: Path) -> None:
    """Pairs are learned by groups, scored with an interval, and named in report and card."""
    rows = ["a,b,same"]
    for line in (home / "triplets.csv").read_text().splitlines()[1:]:
        anchor, positive, negative = line.split(",")
        rows += [f"{anchor},{positive},1", f"{anchor},{negative},0"]
    (home / "pairs.csv").write_text("\n".join(rows))
    outcome = nofuss("train", home / "pairs.csv", "--out", "run", "--epochs", 2)
    assert outcome.code == 0, outcome.err
    assert "8 groups" in outcome.out
    scores = json.loads(Path("run/scores.json").read_text())
    low, high = scores["ordered_interval"]
    assert 0 <= low <= scores["ordered"] <= high <= 1
    assert "ordered" in Path("run/README.md").read_text()
    assert "in the right order" in Path("run/report.html").read_text()
    again = nofuss("evaluate", "run", home / "triplets.csv", "--json")
    assert json.loads(again.out)["triplets"] == 32
    other = nofuss("train", home / "pairs.csv", "--out", "other", "--epochs", 1)
    assert other.code == 0, other.err
    assert "labels" in one_line(nofuss("compare", "run", "other"), 2)
    refused = nofuss("train", home / "pairs.csv", "--assignment", "dynamic", "--out", "no")
    assert "dynamic" in one_line(refused, 2)


@pytest.mark.slow
def test_labels_and_triplets_give_both_scores(nofuss: Call, home: Path) -> None:
    with np.load(home / "vectors.npz") as arrays:
        start = 6 * np.repeat(np.arange(12), 5)
        triplets = np.stack([start, start + 1 + np.arange(60) % 5, (start + 6) % 72], axis=1)
        np.savez("both.npz", triplets=triplets, **arrays)
    options = ("--test-fraction", 0.5, "--epochs", 1, "--dim", 8)
    outcome = nofuss("train", "both.npz", "--out", "run", *options)
    assert outcome.code == 0, outcome.err
    scores = json.loads(Path("run/scores.json").read_text())
    assert {"recall@1", "ordered", "triplets"} <= scores.keys()
    assert scores["triplets"] == 30
    again = json.loads(nofuss("evaluate", "run", "--json").out)
    assert again["ordered"] == scores["ordered"]
    assert again["recall@1"] == scores["recall@1"]


@pytest.mark.slow
def test_triplets_that_contradict_groups_are_learned_as_they_are(nofuss: Call) -> None:
    random = np.random.default_rng(0)
    rows = np.array([random.permutation(30)[:3] for _ in range(200)])
    np.savez("judged.npz", vectors=random.normal(size=(30, 8)), triplets=rows)
    outcome = nofuss("train", "judged.npz", "--out", "run", "--epochs", 1, "--dim", 4)
    assert outcome.code == 0, outcome.err
    assert json.loads(Path("run/scores.json").read_text())["triplets"] == 40
