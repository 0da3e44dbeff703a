"""Several processes give what one gives: losses, gradients, weights, checkpoints, vectors."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nofuss.commands import embed, evaluate
from nofuss.config import Options
from nofuss.errors import UsageError
from nofuss.search import Index
from nofuss.search.update import update_index
from nofuss.training.train import run_training
from tests.tiny_run import draw
from tests.training import equal_training as trainings
from tests.training.equal_losses import check_losses, check_wrapped_criteria
from tests.training.together import fork_together


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(count: int) -> None:
    """To 1e-6 in double precision, for every loss and assignment; 7 classes divide by none."""
    fork_together(count, check_losses)


def test_criteria_under_ddp_agree_on_proxies_or_refuse() -> None:
    fork_together(2, check_wrapped_criteria)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_weights_after_training_are_those_of_one_process(count: int) -> None:
    fork_together(count, trainings.check_training)


@pytest.mark.slow
def test_checkpoints_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    fork_together(1, partial(trainings.write_the_end, tmp_path / "end"))
    for writers, readers in ((3, (2, 1)), (1, (2,))):
        folder = tmp_path / str(writers)
        fork_together(writers, partial(trainings.write_checkpoint, folder))
        names = sorted(p.name for p in folder.iterdir())
        assert names == ["step-4.safetensors", "step-8.safetensors"]
        for count in readers:
            fork_together(count, partial(trainings.read_checkpoint, folder, tmp_path / "end"))


@pytest.mark.slow
def test_batch_norm_has_one_set_of_statistics_after_training() -> None:
    fork_together(2, trainings.check_batch_norm)


@pytest.mark.slow
def test_a_failure_of_the_first_process_ends_all() -> None:
    fork_together(3, trainings.check_failure)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_words(count: int) -> None:
    fork_together(count, trainings.check_words)


@pytest.mark.slow
def test_evaluate_embed_and_index_are_those_of_one_process(
    picture_run: Path, tmp_path: Path
) -> None:
    """Of pictures, one of which can't be read: the same scores, vectors and index."""
    run = Path(shutil.copytree(picture_run, tmp_path / "run"))
    data, more = picture_run.parent / "data", tmp_path / "more" / "new"
    more.mkdir(parents=True)
    for number in range(7):
        draw(number % 6, 50 + number).save(more / f"{number}.png")
    (more / "4.png").write_bytes(b"no picture")

    found, trained = [], len(Index.load(run / "index"))
    shutil.copytree(run / "index", tmp_path / "before")
    for count in (1, 3):
        fork_together(count, partial(evaluate.main, run))
        fork_together(count, partial(embed.main, run, data, out=tmp_path / f"{count}.npz"))
        fork_together(count, lambda: update_index(run, more.parent) and None)
        index = Index.load(run / "index")
        assert len(index) == trained + 6
        order = np.argsort(index.names)
        scores = json.loads((run / "scores.json").read_text())
        found.append(
            (
                np.load(tmp_path / f"{count}.npz")["vectors"],
                index.vectors[order],
                [scores[name] for name in ("recall@1", "recall@8", "map@r", "nmi", "ami")],
            )
        )
        shutil.rmtree(run / "index")
        shutil.copytree(tmp_path / "before", run / "index")
    for one, several in zip(*found, strict=True):
        np.testing.assert_allclose(several, one, atol=1e-6)


@pytest.mark.slow
def test_max_restarts_asks_for_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UsageError, match="add --out RUN"):
        run_training(Options())
    assert not list(tmp_path.iterdir())
