"""The model card: README.md in the run directory, and what `nofuss push` publishes of a run.

card.md in this folder is the template; its values come from the run's other files. Nothing that is
published says where the run or its data are on the machine that made them.
"""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from nofuss.config import Settings, to_json
from nofuss.evaluate.protocol import compared, describe_gain, score_title
from nofuss.files import write_file
from nofuss.losses import INSTANCE_LOSSES
from nofuss.model.backbones import BESIDE, LICENCES
from nofuss.report.report import foreign, plain, read_optional_json, render
from nofuss.run.choice import BEFORE, CLOSED, NOTHING
from nofuss.run.directory import Run

_RECALLS = ("recall@1", "recall@2", "recall@4", "recall@8")
_SCORES = (*_RECALLS, "map@r", "r_precision", "nmi", "ami", "ordered")
_PUBLISHED = ("recall@1", "map@r", "r_precision", "nmi")


def write_card(run: Run) -> None:
    """Write the run's README.md, or replace it."""
    with foreign(run.path):
        write_file(run.path / "README.md", model_card(run))


def hub_card(run: Run, repository: str) -> str:
    """Return the card of the run for the Hub: front matter, then the run's own text."""
    with foreign(run.path):
        text = model_card(run, published=f"hf://{repository}")
        return f"---\n{front_matter(run, repository)}---\n\n{text}"


def model_card(run: Run, *, published: str | None = None) -> str:
    """Return what the model is, its data, scores, use, limits and making, as Markdown.

    published: the address of a model on the Hub; its card names no place on this machine.
    """
    names = ("data", "scores", "environment", "choice", "model/model")
    data, scores, environment, choice, model = (
        read_optional_json(run.path / f"{name}.json") for name in names
    )
    config = run.config
    baselines, main = scores.get("baselines", {}), "recall@1" if "recall@1" in scores else "ordered"
    best = max((of.get(main, 0) for of in baselines.values()), default=None)
    made = plain(environment.get("command", "unknown"))
    if config.preset == "vectors":
        takes, folder, query, example = "vectors", "DATA.npz", "QUERIES.npz", "x[:2]"
    else:
        takes, folder, query, example = "pictures", "FOLDER", "PICTURE", '["a.jpg", "b.jpg"]'
    return render(
        "report/card.md",
        title=run.path.name if published is None else published.rsplit("/", 1)[1],
        takes=takes,
        dim=model.get("dim", config.dim),
        how=_how(config, choice, model),
        licences=model.get("extra", {}).get(LICENCES, {}),
        config=config,
        data=data,
        scores=scores,
        gain=describe_gain(scores["gain"]) if "gain" in scores else "",
        columns={"by folds" if "folds" in scores else "this model": scores} | baselines,
        metrics=[name for name in _SCORES if name in scores],
        cell=_cell,
        compared=compared(scores) if scores and "queries" not in scores else "",
        published=published,
        place=shlex.quote(str(run.path)),
        address=repr(published or str(run.path)),
        folder=folder,
        query=query,
        example=example,
        no_better=best is not None and best >= scores[main],
        command=made if published is None else without_places(made),
    ).decode()


def without_places(command: str) -> str:
    """Return a command line with the last part of every path in it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "unknown"
    return shlex.join(word if "/" not in word else Path(word).name for word in words)


def _how(config: Settings, choice: dict[str, Any], model: dict[str, Any]) -> str:
    """Return how the embedding was made, as a part of a sentence."""
    names = " and ".join(model.get("backbone", config.backbone).split(BESIDE))
    source = "" if names == "identity" else f" from features of {plain(names)}"
    kept = choice.get("kept")
    if kept == BEFORE:
        return f"{source}, as before training, by which held-out classes lost"
    if kept == NOTHING:
        return f"{source}, unchanged"
    if kept == CLOSED:
        return f"{source}, whitened within the training classes (closed form, no training)"
    proxies = "" if config.loss in INSTANCE_LOSSES else f" ({config.assignment} proxies)"
    return f"{source}, learned with {config.loss}{proxies}"


def _cell(scores: dict[str, Any], name: str) -> str:
    if name not in scores:
        return "–"
    low_high = scores.get(f"{name}_interval")
    interval = f" [{100 * low_high[0]:.1f}, {100 * low_high[1]:.1f}]" if low_high else ""
    return f"{100 * scores[name]:.2f}{interval}"


def front_matter(run: Run, repository: str) -> str:
    """Return tags, data and scores as YAML; every value is JSON, which YAML contains."""
    config, scores = run.config, read_optional_json(run.path / "scores.json")
    vectors = config.preset == "vectors"
    task = "feature-extraction" if vectors else "image-feature-extraction"
    tags = ["metric-learning", "retrieval", "zero-shot", "safetensors", config.loss]
    about: dict[str, Any] = {
        "library_name": "nofuss",
        "pipeline_tag": task,
        "tags": tags,
        "metrics": [name for name in _PUBLISHED if name in scores],
    }
    if about["metrics"]:
        name = "data" if config.data is None else config.data.name
        result = {
            "task": {"type": task, "name": "Retrieval among unseen classes"},
            "dataset": {"type": "private", "name": name, "split": "unseen classes"},
            "metrics": [
                {"type": each, "name": score_title(each), "value": round(scores[each], 6)}
                for each in about["metrics"]
            ],
        }
        about["model-index"] = [{"name": repository.split("/")[1], "results": [result]}]
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in about.items())


def public_config(config: Settings) -> dict[str, Any]:
    """Return the settings with names instead of paths."""

    def name(path: Path | None) -> Path | None:
        return None if path is None else Path(path.name)

    places = {each: name(getattr(config, each)) for each in ("data", "weights", "corrections")}
    return to_json(dataclasses.replace(config, **places, out=None, tensorboard=None))  # type: ignore[arg-type]
