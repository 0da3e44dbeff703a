"""What people say: never lost; what marked pairs teach: they move, everything else stays."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss.data.corrections import Correction
from nofuss.files import locked
from nofuss.geometry import normalize
from nofuss.model.manifest import mapped
from nofuss.search import Index
from nofuss.search.feedback import (
    FILE,
    PICTURE,
    SLACK,
    SWEEPS,
    Feedback,
    Mark,
    Pairs,
    append,
    corrected,
    learned,
    nearest_map,
    read_feedback,
)

APPEND = """
import sys
from pathlib import Path
from nofuss.search.feedback import Mark, append
for i in range(100_000):
    append(Path(sys.argv[1]), [Mark(f"query {i}", f"item {j}", True) for j in range(5)])
    print(i, flush=True)
"""


# ---- the file


def test_the_form_of_a_line_stays(tmp_path: Path) -> None:
    """Files that exist must be read for ever."""
    lines = [
        b'{"query": "a.png", "item": "b.png", "same": true, "time": 1}',
        b'{"query": "picture 00ff", "item": "b.png", "same": false, "time": 2}',
        b'{"item": "b.png", "label": "red", "corrected": "blue", "time": 3}',
    ]
    (tmp_path / FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert read_feedback(tmp_path).lines == (
        Mark("a.png", "b.png", True),
        Mark("picture 00ff", "b.png", False),
        Correction("b.png", "red", "blue"),
    )
    append(tmp_path, [Mark("a.png", "c.png", None)])
    assert (tmp_path / FILE).read_bytes().startswith(b"\n".join(lines) + b"\n")
    last = json.loads((tmp_path / FILE).read_bytes().splitlines()[-1])
    assert abs(last.pop("time") - time.time()) < 60
    assert last == {"query": "a.png", "item": "c.png", "same": None}


def test_the_last_mark_of_a_pair_counts(tmp_path: Path) -> None:
    append(tmp_path, [Mark("a", "b", True), Mark("a", "c", False), Mark("a", "d", True)])
    append(tmp_path, [Mark("a", "c", True), Mark("a", "d", None)])
    feedback = read_feedback(tmp_path)
    assert feedback.marks == {("a", "b"): True, ("a", "c"): True}
    assert feedback.pairs() == [("a", "b", True), ("a", "c", True)]
    assert feedback.first(3).marks == {("a", "b"): True, ("a", "c"): False, ("a", "d"): True}


def test_the_last_mark_of_two_items_counts_in_either_order() -> None:
    said = [Mark("a", "b", True), Mark("a", "c", True), Mark("b", "a", False)]
    assert Feedback(tuple(said)).pairs() == [("a", "c", True), ("b", "a", False)]
    assert Feedback((*said, Mark("a", "b", None))).pairs() == [("a", "c", True)]


def test_a_picture_that_is_not_kept_stands_for_its_first_same_item() -> None:
    first = [Mark(f"{PICTURE}1", "b", False), Mark(f"{PICTURE}1", "c", True)]
    more = [Mark(f"{PICTURE}1", "d", True), Mark(f"{PICTURE}2", "b", False)]
    assert Feedback((*first, *more)).pairs() == [("c", "b", False), ("c", "d", True)]


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_feedback(tmp_path) == Feedback()


@pytest.mark.parametrize(
    "line",
    [
        '{"query": "a", "item": "b", "sa',
        "[1]",
        "null",
        '{"query": 1, "item": "b", "same": true}',
        '{"query": "a", "item": "b", "same": 1}',
        '{"item": "b", "label": null, "corrected": "c"}',
        '{"item": "b", "label": "a", "corrected": ["c"]}',
        "\x00",
        "[" * 100_000,
        '{"query": "a", "item": "b", "same": true, "n": 1' + "0" * 5000 + "}",
    ],
    ids=lambda line: line[:30],
)
def test_what_is_no_whole_line_says_nothing(tmp_path: Path, line: str) -> None:
    append(tmp_path, [Mark("a", "b", True)])
    with (tmp_path / FILE).open("a") as file:
        file.write(line)
    assert read_feedback(tmp_path).marks == {("a", "b"): True}
    append(tmp_path, [Mark("a", "c", False)])  # after the cut line, not in it
    feedback = read_feedback(tmp_path)
    assert feedback.marks == {("a", "b"): True, ("a", "c"): False}
    assert [type(said).__name__ for said in feedback.lines] == ["Mark", "NoneType", "Mark"]


def test_names_of_any_bytes(tmp_path: Path) -> None:
    append(tmp_path, [Mark("caf\udce9", "a\nb", True)])
    assert read_feedback(tmp_path).marks == {("caf\udce9", "a\nb"): True}


@pytest.mark.slow
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
        marked = Counter(query for query, _ in read_feedback(tmp_path).marks)
        assert all(marked[f"query {number}"] == 5 for number in ["0", *told])
        (tmp_path / FILE).unlink()


def test_of_several_writers_none_loses_a_line(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for i in range(20):
            append(tmp_path, [Mark(f"query {number}", f"item {i}", True)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(read_feedback(tmp_path).marks) == 80


# ---- labels


def test_corrected_labels_lie_over_those_of_the_index() -> None:
    names = ["a", "b", "c", "d"]
    index = Index.build(np.eye(4), names=names, labels=["red", "red", "blue", "blue"])
    said = (
        Correction("a", "red", "blue"),
        Correction("b", "red", "green"),
        Correction("b", "red", None),  # taken back
        Correction("c", "yellow", "red"),  # the data say something else by now
        Correction("gone", "red", "blue"),
        Correction("d", "red", "blue"),  # as it was corrected before it was indexed again
        Correction("d", "red", "green"),
    )
    shown = corrected(index, Feedback(said))
    assert shown.labels == ["blue", "red", "blue", "green"]
    assert index.labels == ["red", "red", "blue", "blue"]
    assert [item.label for item in shown.get(["a"])] == ["blue"]
    [found] = shown.search(np.eye(4)[:1], where="label=='red'")
    assert found.names == ["b"]
    assert corrected(index, Feedback(said[2:3])) is index


# ---- what marks teach


def directions(count: int, dim: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def pairs(*given: tuple[int, int, bool]) -> Pairs:
    first, second, same = zip(*given, strict=True) if given else ((), (), ())
    return Pairs(
        torch.tensor(first, dtype=torch.int64),
        torch.tensor(second, dtype=torch.int64),
        torch.tensor(same, dtype=torch.bool),
    )


def slowly(x: Tensor, marked: Pairs, near: float, far: float) -> Tensor:
    """The metric in all D dimensions, one projection after the other, as in the paper."""
    a = torch.eye(x.shape[1], dtype=torch.float64)
    targets = [near**2 if same else far**2 for same in marked.same]
    weights = [0.0] * len(targets)
    for _ in range(SWEEPS):
        for i, (p, q, same) in enumerate(zip(*marked, strict=True)):
            v = (x[p] - x[q]).double()
            distance, sign = float(v @ a @ v), 1 if same else -1
            step = min(weights[i], sign * (1 / distance - 1 / targets[i]) * SLACK / (SLACK + 1))
            weights[i] -= step
            targets[i] = 1 / (1 / targets[i] + sign * step / SLACK)
            a += sign * step / (1 - sign * step * distance) * torch.outer(a @ v, a @ v)
    return a


def test_no_marks_change_nothing() -> None:
    x = directions(20, 6)
    assert torch.equal(nearest_map(x, pairs(), near=0.5, far=1.4), torch.eye(6).double())


def test_it_is_the_metric_of_a_slow_loop() -> None:
    x = directions(20, 9)
    marked = pairs((0, 1, True), (0, 2, False), (3, 4, True), (3, 0, False), (5, 1, True))
    matrix = nearest_map(x, marked, near=0.6, far=1.5)
    torch.testing.assert_close(matrix, matrix.T)
    expected = slowly(x, marked, 0.6, 1.5)
    torch.testing.assert_close(matrix.T @ matrix, expected, atol=5e-3, rtol=5e-3)


def test_pairs_move_and_other_directions_stay() -> None:
    x = directions(40, 30)
    x[2] = normalize(x[:1] + 0.8 * x[2:3])[0]  # alike, and not the same
    marked = pairs((0, 1, True), (0, 2, False))
    matrix = nearest_map(x, marked, near=0.5, far=1.6)
    before, after = x, mapped(x, matrix)

    def apart(v: Tensor, a: int, b: int) -> float:
        return float((v[a] - v[b]).norm())

    assert apart(after, 0, 1) < apart(before, 0, 1) - 0.1
    assert apart(after, 0, 2) > apart(before, 0, 2) + 0.1
    touched = torch.stack([x[0] - x[1], x[0] - x[2]]).double()
    basis = torch.linalg.qr(touched.T).Q
    free = directions(1, 30, seed=1)[0].double()
    free -= basis @ (basis.T @ free)
    torch.testing.assert_close(matrix @ free, free)


def test_a_pair_that_is_right_already_teaches_nothing() -> None:
    x = directions(10, 8)
    distance = float((x[0] - x[1]).norm())
    matrix = nearest_map(x, pairs((0, 1, True)), near=distance + 0.1, far=1.6)
    torch.testing.assert_close(matrix, torch.eye(8).double())


@pytest.mark.parametrize("count", [1, 30])
def test_contradictions_and_copies_are_survived(count: int) -> None:
    x = directions(10, 8)
    x[5] = x[4]
    given = [(0, 1, True), (1, 0, False), (4, 5, False), (4, 5, True)] * count
    matrix = nearest_map(x, pairs(*given), near=0.5, far=1.6)
    assert matrix.isfinite().all()
    assert float(torch.linalg.eigvalsh(matrix).min()) > 0


def test_undoing_is_learning_from_fewer_lines() -> None:
    """To the bit, also after items were added in between and taken away again."""
    index = Index.build(directions(30, 8), names=[str(i) for i in range(30)])
    first, second = Mark("0", "7", True), Mark("0", "3", False)
    base, one, two = index.vectors.clone(), Feedback((first,)), Feedback((first, second))
    after_one = learned(index, one, history=(0,))
    after_two = learned(after_one, two, history=(0, 1))
    assert (after_two.manifest.feedback, after_two.manifest.history) == (2, (0, 1))
    assert not torch.equal(after_two.vectors, after_one.vectors)
    back = learned(after_two, two.first(1), history=(0,))
    assert torch.equal(back.vectors, after_one.vectors)
    assert torch.equal(learned(back, two.first(0), history=()).vectors, base)
    for each in (index, after_one, after_two, back):
        assert torch.equal(each.base, base), "the vectors of the model never change"


def learn_for_ever(run: Path) -> None:
    """Learn and undo, in turn, until killed."""
    index, feedback = Index.load(run / "index"), read_feedback(run)
    for i in range(100_000):
        with locked(run):
            lines = len(feedback.lines) * (1 - i % 2)
            index = learned(index, feedback.first(lines), history=(0,))
            index.commit(index.about)
    os._exit(0)


def test_kills_leave_what_was_in_force_or_what_is_new(own_vector_run: Path) -> None:
    run = own_vector_run
    names, moments = Index.load(run / "index").names, random.Random(0)
    append(run, [Mark(names[0], names[40], True), Mark(names[0], names[3], False)])
    feedback, met = read_feedback(run), set[int]()
    for _ in range(10):
        child = os.fork()  # a new interpreter would take seconds each time
        if child == 0:
            learn_for_ever(run)
        time.sleep(moments.uniform(0.05, 0.4))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        index = Index.load(run / "index")
        met.add(index.manifest.feedback)
        expected = learned(index, feedback.first(index.manifest.feedback), history=())
        assert torch.equal(index.vectors, expected.vectors), "map and lines belong together"
        with locked(run):  # the next one who writes is not hindered
            index.commit(index.about)
    assert met <= {0, 2}


def test_marks_of_items_that_are_gone_teach_nothing() -> None:
    index = Index.build(directions(30, 8), names=[str(i) for i in range(30)])
    said = (Mark("gone", "1", True), Mark(f"{PICTURE}0", "1", True), Mark("2", "gone", False))
    assert len(Pairs.of(Feedback(said), index).same) == 0
    assert learned(index, Feedback(said), history=()).matrix is None
