"""README.md says what is so: its Python runs, its tree is the real one."""

import re
from pathlib import Path

import numpy as np
import pytest

import nofuss
from tests.tiny_run import draw

README = Path(nofuss.__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="an installed package has no README")


def test_the_tree_names_every_room_and_nothing_else() -> None:
    tree = re.search(r"```\nnofuss/\n(.*?)```", README.read_text(), re.S)
    assert tree
    named = set(re.findall(r"^  (\w+)(?:/|\.py)", tree[1], re.M))
    root = Path(nofuss.__file__).parent
    there = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert named == there - {"__init__", "__main__", "__pycache__", "py"}


def test_the_python_of_the_first_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for label in range(4):
        folder = tmp_path / "photos" / f"class {label}"
        folder.mkdir(parents=True)
        for number in range(4):
            draw(label, number).resize((120, 120)).save(folder / f"{number}.png")
    for name, label in (("a.jpg", 0), ("b.jpg", 1)):
        draw(label, 9).resize((120, 120)).convert("RGB").save(name)
    random = np.random.default_rng(0)
    given = {
        "X": random.normal(size=(60, 12)).astype(np.float32),
        "y": np.repeat(np.arange(6), 10),
        "X_new": random.normal(size=(5, 12)).astype(np.float32),
    }
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert block
    exec(block[1], given)
    assert given["vectors"].shape[0] == 2  # type: ignore[attr-defined]
    assert given["better"].shape == (5, 12)
    assert Path("runs/photos/report.html").is_file()
