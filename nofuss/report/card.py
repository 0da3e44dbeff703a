"""The model card: README.md in the run directory, written from the run's other files."""

import shlex
from pathlib import Path
from typing import Any

from nofuss.config import Settings
from nofuss.evaluate.protocol import compared, describe_gain
from nofuss.files import write_file
from nofuss.losses import INSTANCE_LOSSES
from nofuss.report import foreign, read_optional_json
from nofuss.run.choice import BEFORE, CLOSED, NOTHING
from nofuss.run.directory import Run

FILES = '["a.jpg", "b.jpg"]'
_RECALLS = ("recall@1", "recall@2", "recall@4", "recall@8")
_SCORES = (*_RECALLS, "map@r", "r_precision", "nmi", "ami", "ordered")


def write_card(run: Run) -> None:
    """Write the run's README.md, or replace it."""
    with foreign(run.path):
        write_file(run.path / "README.md", model_card(run))


def model_card(run: Run, *, published: str | None = None) -> str:
    """Return what the model is, its data, scores, use, limits and making, as Markdown.

    published: the address of a model on the Hub; its card names no place on this machine.
    """
    data = read_optional_json(run.path / "data.json")
    scores = read_optional_json(run.path / "scores.json")
    model = read_optional_json(run.model / "model.json")
    environment = read_optional_json(run.path / "environment.json")
    choice = read_optional_json(run.path / "choice.json")
    config = run.config
    dim = model.get("dim", config.dim)
    where = shlex.quote(str(run.path))
    title = run.path.name if published is None else published.rsplit("/", 1)[1]
    made = _plain(str(environment.get("command", "unknown")))
    machine = ", versions and machine in `environment.json`" if published is None else ""
    if config.preset == "vectors":
        takes, folder, query, example = "vectors", "DATA.npz", "QUERIES.npz", "x[:2]"
    else:
        takes, folder, query, example = "pictures", "FOLDER", "PICTURE", FILES
    parts = [
        f"# {_plain(title)}",
        f"An embedding of {takes} in {dim} dimensions{_how(config, choice)}; preset "
        f"`{config.preset}`. Items of one class lie close together, also those of classes that "
        "were not in training. Distances are Euclidean on the unit sphere: 0 for equal items, 2 "
        "for opposite ones.",
        "## Data",
        _data(data),
        "## Scores",
        _scores(scores),
        "## Use",
        _block(
            f"nofuss index {where} {folder}  # once, and after changes",
            f"nofuss search {where} {query} -k 10",
            f"nofuss evaluate {where} OTHER_DATA",
        )
        if published is None
        else _block(
            "pip install 'nofuss[hub]'", f"nofuss embed {published} {folder} --out FILE.npz"
        ),
        _block(
            "import nofuss",
            f"encoder = nofuss.load({(published or str(run.path))!r})",
            f"vectors = encoder.embed({example})  # (2, {dim}), unit length",
            language="python",
        ),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(model, scores)),
        "## How it was made",
        _block(made if published is None else without_places(made)),
        f"Settings in `config.json`{machine}, seed {config.seed}. "
        "The weights are safetensors: loading them runs no code.",
    ]
    return "\n\n".join(parts) + "\n"


def without_places(command: str) -> str:
    """Return a command line with the last part of every path in it."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "unknown"
    return shlex.join(word if "/" not in word else Path(word).name for word in words)


def _how(config: Settings, choice: dict[str, Any]) -> str:
    """Return how the embedding was made, as a part of a sentence."""
    backbone = _plain(str(config.backbone))
    source = "" if config.backbone == "identity" else f" from features of {backbone}"
    kept = choice.get("kept")
    if kept == BEFORE:
        return f"{source}, as before training, by which held-out classes lost"
    if kept == NOTHING:
        return f"{source}, unchanged"
    if kept == CLOSED:
        return f"{source}, whitened within the training classes (closed form, no training)"
    proxies = "" if config.loss in INSTANCE_LOSSES else f" ({config.assignment} proxies)"
    return f"{source}, learned with {config.loss}{proxies}"


def _data(data: dict[str, Any]) -> str:
    if not data:
        return "Unknown: data.json is missing."
    sides = {"train": "training", "val": "validation", "test": "test, never seen"}
    rows = [
        f"| {sides[side]} | {len(data['classes'][side]):,} | {count:,} |"
        for side, count in data["items"].items()
    ]
    kind = "groups" if data.get("by_links") else "classes"
    table = "\n".join([f"| | {kind} | items |", "|---|---:|---:|", *rows])
    return f"{_plain(data['description'])}\n\n{table}"


def _scores(scores: dict[str, Any]) -> str:
    if not scores:
        return "None: nothing was held out. `nofuss evaluate RUN DATA` computes scores."
    if "gain" in scores:
        over = _plain(scores["gain"]["over"])
        gain = f"Gain over the {over}: {describe_gain(scores['gain'])}.\n\n"
    else:
        gain = ""
    by_folds = "folds" in scores
    columns = {"by folds" if by_folds else "this model": scores} | scores.get("baselines", {})
    head = "| % | " + " | ".join(map(_plain, columns)) + " |"
    lines = [head, "|---|" + "---:|" * len(columns)]
    for name in _SCORES:
        if name in scores:
            cells = (_cell(of, name) for of in columns.values())
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if "queries" in scores:
        source = f"On {scores['queries']:,} queries of {scores['classes']:,} unseen classes; "
    else:
        source = f"On {compared(scores)} that were held out; `ordered` is in the right order; "
    source += f"95% intervals in brackets. Protocol: {scores['protocol']}."
    if by_folds:
        source += (
            " The model itself was trained on all classes; the scores are those of its folds, "
            "whose models were trained on fewer classes."
        )
    return gain + "\n".join(lines) + f"\n\n{source}"


def _cell(scores: dict[str, Any], name: str) -> str:
    if name not in scores:
        return "–"
    low_high = scores.get(f"{name}_interval")
    interval = f" [{100 * low_high[0]:.1f}, {100 * low_high[1]:.1f}]" if low_high else ""
    return f"{100 * scores[name]:.2f}{interval}"


def _limits(model: dict[str, Any], scores: dict[str, Any]) -> list[str]:
    extra = model.get("extra", {})
    lines = [
        "It ranks by what distinguishes the training classes; other similarities may not count.",
        "The scores hold for items of the same kind as those that were tested above.",
    ]
    if (open_set := extra.get("open_set")) and open_set["useful"]:
        lines.append(
            f'Search answers "nothing like this here" by the {open_set["rule"]}. On '
            f"{open_set['classes']:,} held-out training classes this was wrong for "
            f"{open_set['false_rejections']:.0%} of the items whose class was there, and right for "
            f"{open_set['rejected']:.0%} of the others (AUROC {open_set['auroc']:.2f}). An index "
            "is calibrated again whenever it changes: `nofuss index` prints its own figures."
        )
    elif open_set:
        lines.append(
            'Search does not answer "nothing like this here" with confidence: on held-out training '
            f"classes unknown ones look like the others (AUROC {open_set['auroc']:.2f})."
        )
    elif "ordered" in scores and "recall@1" not in scores:
        lines.append('Search never answers "nothing like this here": that needs labels.')
    else:
        lines.append(
            'Search never answers "nothing like this here": too few classes were held out to find '
            "a distance for it."
        )
    main, label = ("recall@1", "Recall@1") if "recall@1" in scores else ("ordered", "score")
    best = max((b.get(main, 0) for b in scores.get("baselines", {}).values()), default=None)
    if best is not None and best >= scores[main]:
        lines.append(f"An untrained baseline has the same {label} or a higher one: see the table.")
    lines.append("It carries the biases of its training data, and of the backbone's training data.")
    return lines


def _block(*lines: str, language: str = "bash") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _plain(text: str) -> str:
    """Return text that can't break out of its line, table cell or code block."""
    printable = "".join(c if c.isprintable() else "�" for c in text)
    return printable.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
