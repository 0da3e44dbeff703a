"""`nofuss push`: publish a run's model on the Hugging Face Hub."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import RunPath, console
from nofuss.errors import UsageError
from nofuss.progress import working


def main(
    run: RunPath,
    repository: Annotated[str, Parameter(name="USER/NAME")],
    /,
    *,
    public: bool = False,
    message: Annotated[str, Parameter(metavar="TEXT")] = "Push a model of nofuss",
) -> None:
    """Publish a run's model on the Hugging Face Hub: weights, settings, scores and card.

    The names of the training classes are part of the model. Pictures, embeddings and paths of this
    machine stay here. Log in first: hf auth login, or set HF_TOKEN.

    Args:
        run: A run directory of `nofuss train`.
        repository: The repository; it is created if it does not exist.
        public: Let everybody read a new repository; without it only you can.
        message: The message of the commit.
    """
    from nofuss.files import json_bytes  # all here, so that --help is quick
    from nofuss.model.encoder import fold_feedback
    from nofuss.model.hub import FOLDER, is_address, parse_address, upload
    from nofuss.model.saved import load_model, model_files, save_model
    from nofuss.report import read_optional_json
    from nofuss.report.card import hub_card, public_config
    from nofuss.run.directory import Run

    address = parse_address(repository if is_address(repository) else f"hf://{repository}")
    name = address.repository
    if address.revision is not None:
        raise UsageError(f"{repository} names a revision, but push adds a commit; leave it out")
    opened = Run.open(run)
    described = {
        "README.md": hub_card(opened, name).encode(),
        "config.json": json_bytes(public_config(opened.config)),
    }
    if scores := read_optional_json(opened.path / "scores.json"):
        described["scores.json"] = json_bytes(scores)
    embedder, class_names, extra, digest = load_model(opened.model)
    fold_feedback(embedder, opened.path, digest)
    with TemporaryDirectory() as folder, working(console.progress, f"pushing to {name}"):
        save_model(Path(folder), embedder, class_names=class_names, extra=extra)
        files = {f"{FOLDER}/{file.name}": file for file in model_files(Path(folder))}
        pushed = upload({**described, **files}, name, public=public, message=message)
    console.say(f"pushed: {pushed}")
    console.say(f"load it: nofuss.load({str(pushed)!r})")
