"""Marks: appended, read back, never lost, whatever ends the process that appends them."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nofuss.run.marks import FILE, PICTURE, append_marks, read_marks

APPEND = """
import sys
from pathlib import Path
from nofuss.run.marks import append_marks
for i in range(100_000):
    append_marks(Path(sys.argv[1]), f"query {i}", [(f"item {j}", True) for j in range(5)])
    print(i, flush=True)
"""


def test_the_last_mark_of_a_pair_counts(tmp_path: Path) -> None:
    append_marks(tmp_path, "a", [("b", True), ("c", False), ("d", True)])
    append_marks(tmp_path, "a", [("c", True), ("d", None)])
    marks = read_marks(tmp_path)
    assert marks.by_query == {"a": {"b": True, "c": True}}
    assert len(marks) == 2
    assert marks.pairs() == [("a", "b", True), ("a", "c", True)]


def test_a_picture_that_is_not_kept_stands_for_its_first_same_item(tmp_path: Path) -> None:
    append_marks(tmp_path, f"{PICTURE}1", [("b", False), ("c", True), ("d", True)])
    append_marks(tmp_path, f"{PICTURE}2", [("b", False)])
    assert read_marks(tmp_path).pairs() == [("c", "b", False), ("c", "d", True)]


def test_no_file_has_no_marks(tmp_path: Path) -> None:
    assert len(read_marks(tmp_path)) == 0


@pytest.mark.parametrize(
    "line", ['{"query": "a", "item": "b", "sa', "[1]", "null", '{"query": 1, "item": "b"}', "\x00"]
)
def test_a_line_that_is_not_whole_is_skipped(tmp_path: Path, line: str) -> None:
    append_marks(tmp_path, "a", [("b", True)])
    with (tmp_path / FILE).open("a") as file:
        file.write(line)
    marks = read_marks(tmp_path)
    assert (len(marks), marks.torn) == (1, 1)
    append_marks(tmp_path, "a", [("c", False)])  # after the torn line, not in it
    marks = read_marks(tmp_path)
    assert marks.by_query == {"a": {"b": True, "c": False}}
    assert marks.torn == 1


def test_names_of_any_bytes(tmp_path: Path) -> None:
    append_marks(tmp_path, "caf\udce9", [("a\nb", True)])
    marks = read_marks(tmp_path)
    assert marks.by_query == {"caf\udce9": {"a\nb": True}}
    assert marks.as_csv({"a\nb": "x"}).decode().splitlines()[1].endswith(",x,same")


def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    seed = random.Random(0)
    command = [sys.executable, "-c", APPEND, str(tmp_path)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(seed.uniform(0.05, 0.3))
            process.send_signal(signal.SIGKILL)
            told = [line for line in process.stdout.read().split("\n")[:-1] if line]
        marks = read_marks(tmp_path)
        assert marks.torn <= 1
        for number in ["0", *told]:
            assert len(marks.by_query[f"query {number}"]) == 5
        (tmp_path / FILE).unlink()
