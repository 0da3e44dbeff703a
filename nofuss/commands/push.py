"""`nofuss push`: publish a run's model on the Hugging Face Hub."""

from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import RunPath, console
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
    from nofuss.model.hub import FOLDER, is_address, parse_address, upload
    from nofuss.model.saved import load_model, model_files
    from nofuss.report import read_optional_json
    from nofuss.report.card import hub_card, public_config
    from nofuss.run.directory import Run

    address = repository if is_address(repository) else f"hf://{repository}"
    name = parse_address(address).repository
    opened = Run.open(run)
    load_model(opened.model)  # refuses what is damaged before anybody else gets it
    files = {f"{FOLDER}/{file.name}": file for file in model_files(opened.model)}
    described = {
        "README.md": hub_card(opened, name).encode(),
        "config.json": json_bytes(public_config(opened.config)),
    }
    if scores := read_optional_json(opened.path / "scores.json"):
        described["scores.json"] = json_bytes(scores)
    with working(console.progress, f"pushing to {name}"):
        pushed = upload({**described, **files}, name, public=public, message=message)
    console.say(f"pushed: {pushed}")
    console.say(f"load it: nofuss.load({str(pushed)!r})")
