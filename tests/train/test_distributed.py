"""Several processes give what one gives: losses, gradients, weights, checkpoints, scores."""

from functools import partial
from pathlib import Path

import pytest

from tests.train import equal_training as trainings
from tests.train.equal_losses import check_losses
from tests.train.together import fork_together


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(count: int) -> None:
    """To 1e-6 in double precision, for every loss and assignment; 7 classes divide by none."""
    fork_together(count, check_losses)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_weights_after_training_are_those_of_one_process(count: int) -> None:
    fork_together(count, trainings.check_training)


def test_checkpoints_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    fork_together(1, partial(trainings.write_the_end, tmp_path / "end"))
    for writers, readers in ((3, 2), (2, 1), (1, 3)):
        folder = tmp_path / str(writers)
        fork_together(writers, partial(trainings.write_checkpoint, folder))
        names = sorted(p.name for p in (folder / "step-8").iterdir())
        shards = [f"shard-{r}.safetensors" for r in range(writers)]
        assert names == ["manifest.json", *shards, "state.json", "tensors.safetensors"]
        for count in (readers, writers):
            fork_together(count, partial(trainings.read_checkpoint, folder, tmp_path / "end"))


@pytest.mark.parametrize("count", [2, 3])
def test_scores_are_those_of_one_process(count: int) -> None:
    fork_together(count, trainings.check_scores)


@pytest.mark.parametrize("count", [1, 3])
def test_words(count: int) -> None:
    fork_together(count, trainings.check_words)
