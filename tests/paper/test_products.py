"""`reproduce products` and `train han` on a miniature of the set, which needs no font package."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.cli import main
from nofuss.data.readers import han
from tests.data.readers.test_han import FACES, LETTERS, SMALL


@pytest.fixture
def miniature(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path, letters_file: Path
) -> Path:
    """The set's name stands for a few letters of matplotlib's faces, rendered before."""
    monkeypatch.setattr(han, "font_files", lambda: FACES)
    monkeypatch.setattr(han, "render", lambda files: dict(np.load(letters_file)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def letters_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("letters") / "letters.npz"
    np.savez_compressed(file, **han.render(FACES, blocks=LETTERS, shape=SMALL))
    return file


@pytest.mark.slow
def test_the_table_of_products(miniature: Path) -> None:
    assert main(["reproduce", "products", "--out", "out"]) == 0
    entries = json.loads((miniature / "out" / "results.json").read_text())["entries"]
    assert [(e["name"], e["data"]) for e in entries] == [
        ("products", "han"),
        ("convergence", "han"),
    ]
    scores = entries[0]["tables"][0]
    assert scores["head"] == ["%", "R@1", "R@10", "R@100", "R@1000", "NMI"]
    assert len(scores["rows"]) == 7 + 2  # methods; raw pixels and before training
    assert {row[0] for row in scores["rows"]} >= {"Proxy-NCA++", "Lifted structure"}
    assert len(entries[1]["figures"]) == 2
    assert (miniature / "out" / "report.html").is_file()


@pytest.mark.slow
def test_a_run_remembers_the_set_by_name(
    miniature: Path, letters_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "han", "--out", "run", "--epochs", "1"]) == 0
    assert json.loads((miniature / "run" / "config.json").read_text())["data"] == "han"
    assert main(["train", "--out", "run", "--resume"]) == 0
    assert main(["evaluate", "run"]) == 0
    assert "55 classes, 220 images" in capsys.readouterr().out
    with np.load(letters_file) as letters:
        row = np.flatnonzero(letters["split"] == "test")[0]
        Image.fromarray(letters["images"][row]).save("letter.png")
        name = chr(letters["codes"][letters["labels"][row]])
    assert main(["search", "run", "letter.png", "-k", "1", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["queries"]
    assert answer["neighbours"][0]["label"] == name, "its own picture is the nearest"
