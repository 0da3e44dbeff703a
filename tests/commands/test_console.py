"""What reaches the terminal: lines, progress, and no name of a file that acts on it."""

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from nofuss.cli import main
from nofuss.commands import console
from nofuss.errors import visible

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r[bold red]x[/]\u202e\x9b31m"
"""A title for the window, an empty screen, markup, text that runs the other way, C1's colours."""
NAME = HOSTILE.replace("/", "")
"""As a file may be called."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Capture = pytest.CaptureFixture[str]


def tables(title: str) -> None:
    console.table(title, [title, title], [[title, title]])


def bars(words: str) -> None:
    with console.speaking(verbose=True):
        console.progress(words, 0, 1)
        console.progress(words, 1, 1)


def logged(words: str) -> None:
    with console.speaking():
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("nofuss").log(level, words)


def quoted(words: str) -> None:
    console.print_json({words: [words, "\x7f"]})


@pytest.mark.parametrize("show", [console.say, console.fail, tables, bars, logged, quoted])
def test_names_are_shown_and_obeyed_nowhere(
    show: Callable[[str], None], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LONG", 0.0)  # so that all work is mentioned
    show(HOSTILE)
    out, err = capsys.readouterr()
    assert "owned" in out + err
    assert "[bold red]x[/]" in out + err
    assert not CONTROL.search(out + err)


def noted(words: str) -> None:
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        record = logging.makeLogRecord({"msg": words, "levelno": level})
        console._Handler(console.out).emit(record)


def test_nor_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there are escape sequences, but they are all ours."""
    for show in (console.say, noted, tables):
        written = {}
        for words in (HOSTILE, visible(HOSTILE)):
            file = io.StringIO()
            screen = Console(
                file=file, force_terminal=True, highlight=False, soft_wrap=True, emoji=False
            )
            monkeypatch.setattr(console, "out", screen)
            monkeypatch.setattr(console, "err", screen)
            show(words)
            written[words] = file.getvalue()
        assert len(set(written.values())) == 1


def test_records_are_notes_and_warnings_and_beside_json_on_standard_error(
    capsys: Capture,
) -> None:
    log = logging.getLogger("nofuss")
    for as_json in (False, True):
        with console.speaking(as_json=as_json):
            log.info("embedded")
            log.warning("left out")
            log.error("failed")
        out, err = capsys.readouterr()
        notes = err if as_json else out
        assert notes.splitlines()[:2] == ["embedded", "note: left out"]
        assert err.splitlines()[-1] == "nofuss: failed"
        assert not (as_json and out)
    log.warning("nobody listens")
    with console.speaking(aloud=False):  # another process of several
        log.info("embedded")
        console.say("result")
        console.progress("embedding", 0, 1)
    assert capsys.readouterr() == ("", "")


def test_in_a_pipe_long_work_is_mentioned_while_and_after_it_is_done(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LONG", 0.5)
    with console.speaking():
        console.progress("drawing", 0, 1)
        console.progress("drawing", 1, 1)  # at once: not worth a line
        console.progress("embedding", 0, 2_000)
        console.progress("embedding", 1_024, 2_000)
        while not (said := capsys.readouterr().out):
            time.sleep(0.01)
        assert re.fullmatch(r"embedding: 1,024 of 2,000  [\d,]+/s\n", said)
        time.sleep(console.LONG)
        console.progress("embedding", 2_000, 2_000)
    assert re.fullmatch(r"embedding: 2,000 in [\d.]+ s \([\d,]+/s\)\n", capsys.readouterr().out)


def test_on_a_terminal_there_is_a_bar_and_verbose_says_how_long_work_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=80, highlight=False, soft_wrap=True)
    monkeypatch.setattr(console, "out", screen)
    monkeypatch.setattr(console, "LONG", 0.0)
    with console.speaking(verbose=True):
        console.progress("embedding", 0, 40)
        console.progress("embedding", 20, 40)
        while "20 of 40" not in file.getvalue():
            time.sleep(0.01)
        console.progress("embedding", 40, 40)
    assert "embedding: 40 in " in file.getvalue().splitlines()[-1]


def test_what_hides_the_output_of_a_library_does_not_hide_ours(capsys: Capture) -> None:
    with console.speaking(), contextlib.redirect_stdout(io.StringIO()) as hidden:
        print("chatter")
        console.say("ours")
    assert hidden.getvalue() == "chatter\n"
    assert capsys.readouterr().out == "ours\n"


@given(st.text())
def test_visible_text_stays_and_is_one_line(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown
    if text.isprintable():
        assert shown == text


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_nor_do_its_usage_errors_and_tracebacks(tmp_path: Path) -> None:
    for words in (["serve", "run", f"--{NAME}"], ["train", f"no{NAME}", "--debug"]):
        ran = subprocess.run(
            [sys.executable, "-m", "nofuss", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert ran.returncode in (1, 2)
        assert "owned" in ran.stderr
        assert not CONTROL.search(ran.stdout + ran.stderr), ran.stderr
    assert "Traceback" in ran.stderr


@pytest.mark.slow
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
