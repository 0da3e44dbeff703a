"""What `nofuss push` publishes of a run: the card with YAML front matter, settings without places.

Nothing in it says where the run or its data are on the machine that made them.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from nofuss.config import Settings, to_json
from nofuss.report import foreign, read_optional_json
from nofuss.report.card import model_card
from nofuss.run.directory import Run

METRICS = {"recall@1": "Recall@1", "map@r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI"}


def hub_card(run: Run, repository: str) -> str:
    """Return the card of the run for the Hub: front matter, then the run's own text."""
    with foreign(run.path):
        text = model_card(run, published=f"hf://{repository}")
        return f"---\n{front_matter(run, repository)}---\n\n{text}"


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
        "metrics": [name for name in METRICS if name in scores],
    }
    if about["metrics"]:
        name = "data" if config.data is None else config.data.name
        result = {
            "task": {"type": task, "name": "Retrieval among unseen classes"},
            "dataset": {"type": "private", "name": name, "split": "unseen classes"},
            "metrics": [
                {"type": each, "name": METRICS[each], "value": round(scores[each], 6)}
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
