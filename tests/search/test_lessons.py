"""Lessons from marks: model, index and kept embeddings change together, and back again."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nofuss.config import Options
from nofuss.data.open import open_data
from nofuss.errors import RunError
from nofuss.files import OWNER, digest, locked
from nofuss.model.encoder import load
from nofuss.model.taught import mapped
from nofuss.run.directory import Run
from nofuss.run.embeddings import FILE as EMBEDDINGS
from nofuss.run.marks import Marks
from nofuss.search import lessons
from nofuss.search.folder import FolderIndex
from nofuss.search.refusals import Refused
from nofuss.search.searchable import kept_embeddings
from nofuss.search.shelf import open_shelf
from nofuss.search.teaching import plan_lesson
from nofuss.search.update import update_index
from nofuss.training.train import run_training
from tests.tiny_run import train_vectors

CLOSE = {"atol": 2e-5, "rtol": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train_vectors(tmp_path_factory.mktemp("vectors"))
    update_index(run, None)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def bits(folder: Path) -> dict[str, str]:
    return {p.name: digest(p.read_bytes()) for p in folder.iterdir() if p.is_file()}


def a_map(seed: int = 0) -> torch.Tensor:
    change = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.eye(8).double() + 0.05 * (change + change.T)


def check_consistent(run: Path) -> None:
    """The index and the kept embeddings are what the model makes of the data."""
    encoder, opened = load(run), Run.open(run)
    collection = open_data(opened.config.data)
    embedded = encoder.embed_collection(collection)
    index = FolderIndex.load(run / "index")
    rows = [int(name.rpartition("#")[2]) for name in index.names]
    torch.testing.assert_close(index.vectors, embedded[rows], **CLOSE)
    kept = kept_embeddings(opened, encoder)
    assert kept is not None
    torch.testing.assert_close(torch.from_numpy(kept.test), embedded[kept.test_rows], **CLOSE)
    assert len(open_shelf(run).index) == len(index)


def test_a_lesson_changes_everything_alike(run: Path) -> None:
    before = load(run)
    x = torch.from_numpy(np.asarray(open_data(Run.open(run).config.data).array))
    lessons.apply_lesson(Run.open(run), a_map(), extra={"taught": {"marks": 3}})
    after = load(run)
    torch.testing.assert_close(after.embed(x), mapped(before.embed(x), a_map()), **CLOSE)
    assert after.extra == before.extra | {"taught": {"marks": 3}}
    check_consistent(run)


def test_undoing_it_restores_every_bit(run: Path) -> None:
    """Of the model and of the kept embeddings; the index as closely as numbers are rounded."""
    opened = Run.open(run)
    model, embeddings = [bits(run / "model")], [bits(run)[EMBEDDINGS]]
    vectors = FolderIndex.load(run / "index").vectors
    for seed in range(3):
        lessons.apply_lesson(opened, a_map(seed), extra={})
        model.append(bits(run / "model"))
        embeddings.append(bits(run)[EMBEDDINGS])
    assert len({each["model.json"] for each in model}) == 4
    for expected, kept in zip(model[-2::-1], embeddings[-2::-1], strict=True):
        assert lessons.undo(opened)
        assert bits(run / "model") == expected
        assert bits(run)[EMBEDDINGS] == kept
        check_consistent(run)
    torch.testing.assert_close(FolderIndex.load(run / "index").vectors, vectors, atol=1e-6, rtol=0)
    assert not lessons.undo(opened)


def test_lessons_start_from_the_first_model(run: Path) -> None:
    """Two lessons are as good as the second one alone: nothing adds up."""
    opened = Run.open(run)
    lessons.apply_lesson(opened, a_map(1), extra={})
    lessons.apply_lesson(opened, a_map(2), extra={})
    twice = bits(run / "model")
    lessons.undo(opened)
    lessons.undo(opened)
    lessons.apply_lesson(opened, a_map(2), extra={})
    assert bits(run / "model") == twice


def teach_for_ever(run: Path) -> None:
    """Two lessons, one undone, and so on, until killed."""
    opened = Run.open(run)
    for i in range(10_000):
        if i % 3 == 2:
            lessons.undo(opened)
        else:
            lessons.apply_lesson(opened, a_map(i), extra={})
    os._exit(0)


def test_kills_leave_a_run_that_opens(run: Path) -> None:
    moments = random.Random(0)
    for _ in range(8):
        child = os.fork()  # a new interpreter would take seconds each time
        if child == 0:
            teach_for_ever(run)
        time.sleep(moments.uniform(0.05, 0.4))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        lessons.finish_lesson(run)
        check_consistent(run)


def test_a_killed_lesson_is_noticed_by_who_only_reads(run: Path) -> None:
    """The model is new, embeddings and index are not yet: neither is taken for the model's."""
    old = (run / EMBEDDINGS).read_bytes()
    shutil.copytree(run / "index", run / "index.old")
    lessons.apply_lesson(Run.open(run), a_map(), extra={})
    shutil.rmtree(run / "index")
    (run / "index.old").rename(run / "index")
    (run / EMBEDDINGS).write_bytes(old)
    (run / "taught" / "embeddings-of").write_text(lessons.steps_of(Run.open(run))[0].digest)
    assert kept_embeddings(Run.open(run), load(run)) is None
    with pytest.raises(RunError, match="made by another model"):
        open_shelf(run)
    lessons.finish_lesson(run)
    check_consistent(run)


def test_a_taught_run_is_opened_while_another_command_writes(run: Path) -> None:
    lessons.apply_lesson(Run.open(run), a_map(), extra={})
    with locked(run):
        lessons.finish_lesson(run)  # nothing to finish: no lock is needed
    assert not (run / OWNER).exists()
    check_consistent(run)


def test_foreign_folders_are_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / "taught").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a link"):
        lessons.apply_lesson(Run.open(run), a_map(), extra={})
    with pytest.raises(RunError, match="is a link"):
        lessons.finish_lesson(run)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_damaged_maps_are_one_line(run: Path) -> None:
    lessons.apply_lesson(Run.open(run), a_map(), extra={})
    (run / "taught" / "1" / "map.safetensors").write_bytes(b"rubbish")
    with pytest.raises(RunError, match="is damaged"):
        lessons.undo(Run.open(run))


def test_marks_become_a_map(run: Path) -> None:
    shelf = open_shelf(run)
    index, names = shelf.own, shelf.own.names
    with pytest.raises(Refused, match="nothing to learn yet"):
        plan_lesson(shelf, Marks({"gone": {names[1]: True}, "picture 1": {names[1]: True}}), None)
    found = shelf.search(index.vectors[0], 5, without=names[0])
    far = names.index(found.hits[-1].name)
    lesson = plan_lesson(shelf, Marks({names[0]: {names[far]: True}}), None)
    assert (lesson.pairs, lesson.marked_rows) == (1, sorted([0, far]))
    before = (index.vectors[0] - index.vectors[far]).norm()
    after = (lesson.vectors[0] - lesson.vectors[far]).norm()
    assert after < before
    # Taught already: the marks are learned from the first model, whatever is in force.
    taught = plan_lesson(
        shelf.mapped(a_map(), shelf.encoder), Marks({names[0]: {names[far]: True}}), a_map()
    )
    torch.testing.assert_close(taught.matrix, lesson.matrix, atol=1e-4, rtol=0)


def test_training_does_not_undo_lessons(run: Path) -> None:
    lessons.apply_lesson(Run.open(run), a_map(), extra={"taught": {"marks": 3}})
    taught = bits(run / "model")
    assert run_training(Options(out=run, resume=True)) == run  # it is finished
    assert bits(run / "model") == taught
