"""The model card: README.md in the run directory, written from what the run holds."""

import shlex
from typing import Any

from nofuss.config import TrainConfig
from nofuss.files.atomic import write_file
from nofuss.losses import INSTANCE_LOSSES
from nofuss.report import foreign, read_optional_json
from nofuss.run.choice import CLOSED, NOTHING, TRAINED
from nofuss.run.directory import Run
from nofuss.terminal.scores import describe_gain

FILES = '["a.jpg", "b.jpg"]'
_SCORES = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "r_precision", "nmi", "ami")


def write_card(run: Run) -> None:
    """Write, or write anew, the run's README.md."""
    with foreign(run.path):
        write_file(run.path / "README.md", model_card(run))


def model_card(run: Run) -> str:
    """What the model is, on what data, how good, how to use it, where it ends; Markdown."""
    data, scores = (
        read_optional_json(run.path / "data.json"),
        read_optional_json(run.path / "scores.json"),
    )
    model = read_optional_json(run.model / "model.json")
    environment = read_optional_json(run.path / "environment.json")
    config, choice = run.config, read_optional_json(run.path / "choice.json").get("choice", {})
    dim = model.get("dim", config.dim)
    where = shlex.quote(str(run.path))
    takes, example = ("vectors", "x[:2]") if config.preset == "vectors" else ("pictures", FILES)
    parts = [
        f"# {_plain(run.path.name)}",
        f"An embedding of {takes} into {dim} dimensions{_how(config, choice)} (settings: "
        f"{config.preset}). Things of one class lie close together, also of classes that were not "
        "in training. Distances are Euclidean on the unit sphere: 0 equal, 2 opposite.",
        "## Data",
        _data(data),
        "## Scores",
        _scores(scores),
        "## Use",
        _block(
            f"nofuss index {where} FOLDER             # once, and after changes",
            f"nofuss search {where} PICTURE -k 10",
            f"nofuss evaluate {where} OTHER_DATA",
        ),
        _block(
            "import nofuss",
            f"encoder = nofuss.load({str(run.path)!r})",
            f"vectors = encoder.embed({example})  # (2, {dim}), unit length",
            language="python",
        ),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(model, scores)),
        "## How it was made",
        _block(_plain(str(environment.get("command", "unknown")))),
        f"Settings in `config.json`, versions and machine in `environment.json`, seed "
        f"{config.seed}. The weights are safetensors: opening them runs no code.",
    ]
    return "\n\n".join(parts) + "\n"


def _how(config: TrainConfig, choice: dict[str, Any]) -> str:
    """How it was made, as the end of a sentence."""
    on = "" if config.backbone == "identity" else f" on features of {_plain(str(config.backbone))}"
    fixed = config.preset in ("frozen", "vectors")
    kept = choice.get("kept", TRAINED) if fixed else TRAINED
    if kept == NOTHING:
        return f"{on}, as they are"
    if kept == CLOSED:
        return f"{on}, whitened within the training classes (closed form, no training)"
    proxies = "" if config.loss in INSTANCE_LOSSES else f" ({config.assignment} proxies)"
    return f"{on}, learned with {config.loss}{proxies}"


def _data(data: dict[str, Any]) -> str:
    if not data:
        return "Unknown: data.json is missing."
    sides = {"train": "training", "held_out": "held out in training", "test": "test, never seen"}
    rows = [
        f"| {sides[side]} | {len(data['classes'][side]):,} | {count:,} |"
        for side, count in data["items"].items()
    ]
    table = "\n".join(["| | classes | items |", "|---|---:|---:|", *rows])
    return f"{_plain(data['description'])}\n\n{table}"


def _scores(scores: dict[str, Any]) -> str:
    if not scores:
        return "None: the run had no test classes. `nofuss evaluate RUN DATA` gives some."
    if "gain" in scores:
        worth = f"Over the {_plain(scores['gain']['over'])}: {describe_gain(scores['gain'])}.\n\n"
    else:
        worth = ""
    folded = "folds" in scores
    columns = {"by folds" if folded else "this model": scores} | scores.get("baselines", {})
    head = "| % | " + " | ".join(map(_plain, columns)) + " |"
    lines = [head, "|---|" + "---:|" * len(columns)]
    for name in _SCORES:
        if name in scores:
            cells = (_cell(of, name) for of in columns.values())
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    about = (
        f"On {scores['queries']:,} queries of {scores['classes']:,} unseen classes; "
        f"95% intervals in brackets. Protocol: {scores['protocol']}."
    )
    if folded:
        about += (
            " The model itself has learned from all classes; it is scored by its folds, whose "
            "models had fewer to learn from."
        )
    return worth + "\n".join(lines) + f"\n\n{about}"


def _cell(scores: dict[str, Any], name: str) -> str:
    if name not in scores:
        return "–"
    low_high = scores.get(f"{name}_interval")
    interval = f" [{100 * low_high[0]:.1f}, {100 * low_high[1]:.1f}]" if low_high else ""
    return f"{100 * scores[name]:.2f}{interval}"


def _limits(model: dict[str, Any], scores: dict[str, Any]) -> list[str]:
    extra = model.get("extra", {})
    lines = [
        "It ranks by what told the training classes apart; other likenesses it may not see.",
        "The scores hold for classes of the same kind as the test classes above.",
    ]
    if "threshold" in extra:
        errors, source = extra["threshold_errors"], extra["threshold_from"]
        lines.append(
            f'Search says "nothing like this here" beyond a distance of {extra["threshold"]:.3f}. '
            f"On {source['classes']:,} held-out training classes that was wrong for "
            f"{errors['denied']:.0%} of the items whose class was there; {errors['accepted']:.0%} "
            "of items whose class was not there were let through. A larger index lets more through."
        )
    else:
        lines.append(
            "No distance is known beyond which nothing is alike: too few classes were held out."
        )
    best = max((b.get("recall@1", 0) for b in scores.get("baselines", {}).values()), default=None)
    if best is not None and best >= scores["recall@1"]:
        lines.append("An untrained baseline finds as much or more at rank 1: see the table.")
    lines.append("Biases of the data, and of the backbone's own training data, are in it too.")
    return lines


def _block(*lines: str, language: str = "bash") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _plain(text: str) -> str:
    """Text that can't break out of its line, table cell or code block."""
    printable = "".join(c if c.isprintable() else "�" for c in text)
    return printable.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
