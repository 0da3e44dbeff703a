"""README.md says what is so: its tree is the real one. What it runs is run by test_docs.py."""

import re
from pathlib import Path

import pytest

import nofuss

README = Path(nofuss.__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="an installed package has no README")


def test_the_tree_names_every_room_and_nothing_else() -> None:
    tree = re.search(r"```\nnofuss/\n(.*?)```", README.read_text(), re.S)
    assert tree
    named = set(re.findall(r"^  (\w+)(?:/|\.py)", tree[1], re.M))
    root = Path(nofuss.__file__).parent
    there = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert named == there - {"__init__", "__main__", "__pycache__", "py"}
