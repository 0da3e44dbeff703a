"""What reaches the terminal: names of files and classes as text, and nothing that acts on it."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from nofuss.cli import main
from nofuss.errors import command, visible
from nofuss.terminal import console

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r[bold red]x[/]\u202e\x9b31m"
"""A title for the window, an empty screen, markup, text that runs the other way, C1's colours."""
NAME = HOSTILE.replace("/", "")
"""As a file may be called."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Capture = pytest.CaptureFixture[str]


def tables(title: str) -> None:
    console.table(title, [title, title], [[title, title]])


def bars(words: str) -> None:
    with console.progress(words, 1) as tell:
        tell(1)


def quoted(words: str) -> None:
    console.print_json({words: [words, "\x7f"]})


@pytest.mark.parametrize(
    "show", [console.say, console.warn, console.aside, console.fail, tables, bars, quoted]
)
def test_names_are_shown_and_obeyed_nowhere(show: Callable[[str], None], capsys: Capture) -> None:
    show(HOSTILE)
    out, err = capsys.readouterr()
    assert "owned" in out + err
    assert "[bold red]x[/]" in out + err
    assert not CONTROL.search(out + err)


def test_nor_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there are escape sequences, but they are all ours."""
    for show in (console.say, console.warn, tables):
        written = {}
        for words in (HOSTILE, visible(HOSTILE)):
            file = io.StringIO()
            screen = Console(
                file=file, force_terminal=True, highlight=False, soft_wrap=True, emoji=False
            )
            monkeypatch.setattr(console, "out", screen)
            show(words)
            written[words] = file.getvalue()
        assert len(set(written.values())) == 1


@given(st.text())
def test_visible_text_stays_and_is_one_line(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown
    if text.isprintable():
        assert shown == text


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "word",
    ["plain", "a b", "$(touch sprung)", "`x`", "it's", HOSTILE, "a\nb", "é\udcff", "-x", "\\"],
)
def test_a_command_to_paste_means_what_it_says(word: str, tmp_path: Path) -> None:
    line = command("printf", "%s", word)
    assert line.isprintable()
    ran = subprocess.run(["bash", "-c", line], capture_output=True, cwd=tmp_path, check=True)
    assert ran.stdout == os.fsencode(word)
    assert not list(tmp_path.iterdir())


def test_plain_commands_stay_plain() -> None:
    assert command("nofuss", "serve", Path("runs/a b")) == shlex.join(
        ["nofuss", "serve", "runs/a b"]
    )


# ---- whole commands


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Class folders and files with names that no terminal should see."""
    random = np.random.default_rng(0)
    for label in range(6):
        folder = tmp_path / NAME / f"{NAME}{label}"
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = (random.integers(0, 60, (16, 16, 3)) + 30 * label).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{NAME}{number}.png")
        (folder / f"{NAME}broken.png").write_bytes(b"no picture")
    return tmp_path / NAME


def test_no_command_lets_them_through(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    run = tmp_path / f"run{NAME}"
    small = [
        "--preset",
        "small",
        "--size",
        "16",
        "--batch-size",
        "4",
        "--dim",
        "4",
        "--epochs",
        "1",
    ]
    picture = next(data.rglob("*0.png"))
    for words, code in (
        (("doctor", data), 0),
        (("train", data, "--out", run, *small), 0),
        (("train", data, "--out", run, *small), 2),
        (("train", "--out", run, "--resume"), 0),
        (("evaluate", run), 0),
        (("index", run, data), 0),
        (("search", run, picture), 0),
        (("search", run, picture, "--json"), 0),
        (("search", run, f"{picture}{NAME}"), 2),
        (("embed", run, data, "--out", tmp_path / f"{NAME}.npz"), 0),
        (("embed", run, data, "--out", tmp_path / f"{NAME}.txt"), 2),
        (("index", run, data, "--remove"), 0),
        (("search", run, picture), 2),
        (("evaluate", data), 2),
        (("train", tmp_path / f"none{NAME}"), 2),
        ((f"do{NAME}",), 2),
    ):
        assert main([str(word) for word in words]) == code, words
        out, err = capsys.readouterr()
        assert not CONTROL.search(out + err), (words, out, err)


def test_nor_do_its_usage_errors_and_tracebacks(tmp_path: Path) -> None:
    for words in (["serve", "run", f"--{NAME}"], ["train", f"no{NAME}", "--debug"]):
        ran = subprocess.run(
            [sys.executable, "-m", "nofuss", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert ran.returncode in (1, 2)
        assert "owned" in ran.stderr
        assert not CONTROL.search(ran.stdout + ran.stderr), ran.stderr
    assert "Traceback" in ran.stderr


def test_a_config_and_tensors_of_strangers(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({HOSTILE: HOSTILE, "loss": HOSTILE}))
    assert main(["evaluate", str(tmp_path)]) == 2
    np.savez(tmp_path / "x.npz", **{HOSTILE: np.zeros((3, 2))})
    assert main(["train", str(tmp_path / "x.npz"), "--out", str(tmp_path / "run")]) == 2
    (tmp_path / "x.csv").write_text(f"path,{HOSTILE}\na,b\n".replace("\r", ""))
    assert main(["train", str(tmp_path / "x.csv"), "--out", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert not CONTROL.search(out + err), (out, err)
    assert len(err.splitlines()) == 3
