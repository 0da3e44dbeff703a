"""Help pages: every command has one, it loads nothing heavy, and a newcomer can read it."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

from nofuss.cli import COMMANDS, main, parse
from nofuss.commands import train
from nofuss.config import TrainConfig
from nofuss.terminal.help import options_of, page, switches_of

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command: str) -> None:
    script = f"""
import sys
from nofuss.cli import main
try:
    main([{command!r}, "--help"])
except SystemExit as leaving:
    assert not leaving.code
heavy = {{"torch", "numpy", "sklearn", "PIL", "matplotlib", "rich"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: nofuss {command} " in done.stdout


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_pages_are_readable(command: str, width: int) -> None:
    module = import_module(f"nofuss.commands.{command}")
    groups = getattr(module, "GROUPS", {})
    text = page(module.main, prog=f"nofuss {command}", groups=groups, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "None" not in text
    assert "True" not in text
    assert "--debug" in text
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M)
    assert len(flags) == len(set(flags))
    for option in options_of(module.main):
        assert option.text, f"{command}: {option.name} has no text"
        assert f"  {option.invocation}" in text
    # A text flows: no line but the last of a paragraph ends long before the margin.
    assert not re.search(r"^ {26}\S{1,20}\n {26}\S{1,20}\n {26}", text, re.M)


def test_the_page_says_what_is_optional_and_what_is_required(capsys: Capture) -> None:
    def usage(command: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main([command, "-h"])
        return capsys.readouterr().out.splitlines()[0]

    assert usage("train") == "usage: nofuss train [DATA] [options]"
    assert usage("evaluate") == "usage: nofuss evaluate RUN [DATA] [options]"
    assert usage("search") == "usage: nofuss search RUN PICTURE … [options]"
    assert usage("embed") == "usage: nofuss embed RUN DATA --out FILE [options]"


def test_groups_name_settings_and_come_in_order() -> None:
    names = [option.name for option in options_of(train.main)]
    grouped = [name for group in train.GROUPS.values() for name in group]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= set(names)
    text = page(train.main, prog="nofuss train", groups=train.GROUPS)
    places = [text.index(f"\n{heading}:") for heading in train.GROUPS]
    assert places == sorted(places)
    assert text.index("--out RUN") < places[1] < text.index("--batch-size N") < places[2]
    assert places[2] < text.index("--scale X")


def test_a_switch_is_on_off_or_not_given() -> None:
    def parsed(*words: str) -> TrainConfig:
        config = parse(["train", "photos", *words])[1].keywords["config"]
        assert isinstance(config, TrainConfig)
        return config

    assert {"mirror", "center", "root", "freeze_batch_norm"} <= switches_of(train.main)
    assert parsed().mirror is None
    assert parsed("--mirror").mirror is True
    assert parsed("--mirror", "--no-center").center is False
    assert parsed("--no-freeze-batch-norm", "--seed", "3").freeze_batch_norm is False
    assert parsed("--root", "False", "--mirror", "True").root is False


@pytest.mark.parametrize(
    ("words", "ours"),
    [("--rate 0.1", "--lr"), ("--batch=8", "--batch-size"), ("-o x", "--out")],
)
def test_names_from_elsewhere_hint_at_ours(words: str, ours: str, capsys: Capture) -> None:
    assert main(["train", "photos", *words.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"nofuss: unknown option {words.split()[0].split('=')[0]}; it is {ours}")
    assert "\n" not in said


def test_a_command_without_our_name_gives_no_hint(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "photos", "--rate", "0.1"])
    assert "--lr" not in capsys.readouterr().err
