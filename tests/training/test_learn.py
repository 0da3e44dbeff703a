"""`nofuss index RUN DIR --learn`: new classes teach, and model and index switch together."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import nofuss
from nofuss import Index
from nofuss.cli import main
from nofuss.errors import UsageError
from nofuss.model.saved import model_digest
from nofuss.training.learn import learn, undo

DIM, OWN = 24, 6


def vectors_of(path: Path, classes: range, *, each: int = 10) -> Path:
    """Classes that differ in three entries of their own; the others are noise."""
    random = np.random.default_rng(classes.start)
    labels = np.repeat(np.arange(classes.start, classes.stop), each)
    centres = np.random.default_rng(0).normal(size=(100, DIM)) * (np.arange(DIM) < 2 * OWN)
    noise = random.normal(size=(len(labels), DIM)) * np.where(np.arange(DIM) < OWN, 0.5, 1.0)
    path.parent.mkdir(exist_ok=True)
    np.savez(path, vectors=(centres[labels] + noise).astype(np.float32), labels=labels)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and beside it classes that are new to it, in its index."""
    home = tmp_path_factory.mktemp("learn")
    data, new = (
        vectors_of(home / f"{n}.npz", c) for n, c in (("old", range(12)), ("new", range(12, 20)))
    )
    run = nofuss.train(data, out=home / "run", head="closed-form", test_fraction=0.25)
    assert main(["index", str(run), str(new)]) == 0
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def agree(run: Path) -> str:
    """Check that index and model belong together; return the model's checksum."""
    digest, index = model_digest(run / "model"), Index.load(run / "index")
    assert index.about.model == digest
    for source in index.about.sources:
        items = list(index.items(source, vectors=True))
        with np.load(source) as arrays:
            rows = [int(item.name.rpartition("#")[2]) for item in items]
            expected = nofuss.load(run, feedback=False).embed(arrays["vectors"][rows])
        found = torch.stack([item.vector for item in items if item.vector is not None])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    return digest


@pytest.mark.slow
def test_new_classes_teach_and_are_taken_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, index = agree(run), Index.load(run / "index")
    caplog.set_level("INFO")
    learn(run)
    assert "the added classes' MAP@R: " in caplog.text
    assert "learned from 80 items of 8 added classes" in caplog.text
    assert agree(run) != before
    learned = Index.load(run / "index")
    assert learned.names == index.names
    assert [i.split for i in learned.items()] == [i.split for i in index.items()]
    assert {str(c) for c in range(12, 20)} <= {*nofuss.load(run).class_names}
    undo(run)
    assert agree(run) == before
    assert torch.equal(Index.load(run / "index").base, index.base)
    assert len([*(run / "index").glob("vectors-*")]) == 1
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(run)


@pytest.mark.slow
def test_what_was_scored_on_teaches_nothing(run: Path) -> None:
    """Labels of test items may be anything: the head that learned is the same."""
    learn(run)
    taught, data = model_digest(run / "model"), nofuss.load(run).embedder.head.weight
    undo(run)
    index = Index.load(run / "index")
    tested = [item for item in index.items() if item.split == "test"]
    assert tested
    index.folder = run / "index"
    index.put([item._replace(label="0") for item in tested])
    index.commit(index.about)
    learn(run)
    assert model_digest(run / "model") == taught
    assert torch.equal(nofuss.load(run).embedder.head.weight, data)


@pytest.mark.slow
def test_a_fault_at_every_rename_leaves_the_old_state_or_the_new(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, states, replace = agree(run), set[bool](), os.replace
    for count in range(20):
        broken = Path(shutil.copytree(run, tmp_path / f"copy {count}"))
        left = [count]

        def failing(*arguments: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            replace(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            try:
                learn(broken)
                is_done = True
            except OSError:
                is_done = False
        states.add(agree(broken) != before)
        assert (agree(broken) != before) == is_done, "the message is true"
        if is_done:
            break
        learn(broken)  # the next writer works
        assert agree(broken) != before
    assert states == {False, True}


def test_there_must_be_something_to_learn_from(vector_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(vector_run, tmp_path / "run"))
    with pytest.raises(UsageError, match="no labelled items but those of the training"):
        learn(run)
    assert main(["index", str(run), "--learn", "--undo"]) == 2
