"""Run a whole training: data → model → training → scores → report.

Other modules do the work; this one puts it in order, and says how to resume what was interrupted.
"""

import logging
from collections.abc import Container, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nofuss.config import TrainConfig, to_json
from nofuss.data.collection import Collection
from nofuss.data.decode import PictureError
from nofuss.distributed import processes
from nofuss.errors import TrainingError
from nofuss.files import write_file
from nofuss.model.backbones import Backbone
from nofuss.training.begin import begin
from nofuss.training.callbacks import Callback, stop_on_signals
from nofuss.training.job import Job, describe_data
from nofuss.training.keeping import embed_items, keep_model, report_scores
from nofuss.training.learning import compute_features, learn
from nofuss.training.step import NonFiniteLoss

log = logging.getLogger("nofuss")


def run_training(
    config: TrainConfig,
    collection: Collection | None = None,
    *,
    given: Container[str] = (),
    backbone: Backbone | None = None,
    callback: Callback | None = None,
) -> Path:
    """Train, score on unseen classes, write a run directory and return its path.

    given: names of settings that the user set; a resumed run must agree with them.
    backbone: a module from Python instead of a backbone by name.
    callback: is called with an `Event` after every step and epoch.
    """
    with ExitStack() as held:  # the lock, from before the run is read until all of it is written
        job = begin(
            config, collection, given=given, backbone=backbone, callback=callback, held=held
        )
        with _failures_explained(job), closing(job.callbacks):
            describe_data(job)
            job.callbacks.here("start", to_json(job.config))
            compute_features(job)
            with stop_on_signals() as stop:
                learn(job, stop)
                if processes.any_true(stop())[0]:  # folds may have decided against training
                    raise KeyboardInterrupt
            embedded = embed_items(job)
            if processes.leave():  # scores and files need one process; the others are done
                keep_model(job, embedded)
                report_scores(job, embedded)
        return job.run.path


@contextmanager
def _failures_explained(job: Job) -> Iterator[None]:
    """Say how to resume whatever ends a training that has a run directory."""
    run = job.run
    try:
        yield
    except NonFiniteLoss as error:
        raise _explain_non_finite(job, error) from None
    except KeyboardInterrupt:
        log.info(f"stopped; resume with: {run.resume_command}")
        raise
    except PictureError as error:  # it was readable when training began
        raise TrainingError(
            f"{error}; restore it, then resume with: {run.resume_command}"
        ) from None
    except (OSError, SafetensorError) as error:  # a full or failing disk
        reason = " ".join(str(error).split())
        raise TrainingError(f"{reason}; fix it, then resume with: {run.resume_command}") from error


def _explain_non_finite(job: Job, error: NonFiniteLoss) -> TrainingError:
    """Write the names of the batch's items to a file and suggest what to try."""
    file = job.run.path / "non_finite_batch.txt"
    names = [job.collection.names[job.split.train[i]] for i in error.indices.tolist()]
    where = f"the batch's items are in {file}"
    try:
        if processes.first():
            write_file(file, "".join(f"{name}\n" for name in names))
    except OSError as failure:
        where = f"the batch's items could not be written ({failure.strerror})"
    saved = ", the last checkpoint is whole" if job.run.checkpoints.is_dir() else ""
    return TrainingError(
        f"{error}; nothing was updated{saved}; {where}; try lower rates, or a lower scale"
    )
