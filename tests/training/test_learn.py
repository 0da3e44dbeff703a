"""`nofuss index RUN DIR --learn`: new classes teach, and model and index switch together."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import nofuss
from nofuss import Index
from nofuss.cli import main
from nofuss.data.corrections import Correction
from nofuss.errors import UsageError
from nofuss.files import read_json
from nofuss.model.saved import model_digest
from nofuss.search.feedback import append
from nofuss.training.learn import learn, undo

DIM, OWN = 24, 6


def vectors_of(path: Path, first: int, stop: int, *, each: int = 10) -> Path:
    """Classes that differ in three entries of their own; the others are noise."""
    random = np.random.default_rng(first)
    labels = np.repeat(np.arange(first, stop), each)
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
        vectors_of(home / f"{n}.npz", *c) for n, c in (("old", (0, 12)), ("new", (12, 20)))
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
    assert main(["index", str(run), "--undo", "--device", "abacus"]) == 2  # it is passed on
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
def test_classes_that_are_scored_on_teach_nothing_however_they_are_added(
    run: Path, tmp_path: Path
) -> None:
    learn(run)
    taught = model_digest(run / "model")
    undo(run)
    scored = int(read_json(run / "data.json")["classes"]["test"][0])
    assert (
        main(["index", str(run), str(vectors_of(tmp_path / "more.npz", scored, scored + 1))]) == 0
    )
    learn(run)
    assert model_digest(run / "model") == taught


@pytest.mark.slow
def test_labels_count_as_people_corrected_them(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = Index.load(run / "index")
    wrong = [item for item in index.items() if item.label == "19"]
    append(run, [Correction(item.name, "19", "18") for item in wrong])
    caplog.set_level("INFO")
    learn(run)
    assert "learned from 80 items of 7 added classes" in caplog.text
    assert "19" not in nofuss.load(run).class_names
    assert Index.load(run / "index").labels == index.labels, "those that are stored stay"


@pytest.mark.slow
def test_a_second_time_is_compared_with_the_model_as_it_was_trained(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = agree(run)
    caplog.set_level("INFO")
    learn(run)
    first = re.findall("[0-9.]+ before, [0-9.]+ after", caplog.text)
    caplog.clear()
    learn(run)
    assert re.findall("[0-9.]+ before, [0-9.]+ after", caplog.text) == first
    assert len(first) == 2
    undo(run)
    assert agree(run) == trained


@pytest.mark.slow
@pytest.mark.parametrize("has_learned", [False, True])
def test_a_fault_at_every_rename_leaves_the_old_state_or_the_new(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_learned: bool
) -> None:
    trained = agree(run)
    if has_learned:
        learn(run)
        assert main(["index", str(run), str(vectors_of(tmp_path / "more.npz", 20, 24))]) == 0
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
        undo(broken)
        assert agree(broken) == trained
    assert states == {False, True}


def test_there_must_be_something_to_learn_from(vector_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(vector_run, tmp_path / "run"))
    with pytest.raises(UsageError, match="no labelled items but those of the training"):
        learn(run)
    assert main(["index", str(run), "--learn", "--undo"]) == 2
