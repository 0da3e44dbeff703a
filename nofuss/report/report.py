"""report.html: all that is worth knowing about a run, in one file that asks for nothing else.

Read from the run directory (config, environment, data, metrics, scores) and its embeddings;
pictures come from the collection. Doubtful labels and copies are also listed in suspects.csv.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from nofuss.data.collection import Collection
from nofuss.errors import NofussError, RunError
from nofuss.files import atomic as files
from nofuss.report import sections
from nofuss.report.grids import Items
from nofuss.report.html import document, tag
from nofuss.report.neighbourhood import neighbourhood
from nofuss.run.embeddings import RunEmbeddings
from nofuss.terminal.scores import describe_gain

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(run: Path, collection: Collection, kept: RunEmbeddings) -> Path:
    """Write report.html and suspects.csv of a run; returns the report's path."""
    with foreign(run):
        return _write(run, collection, kept)


@contextmanager
def foreign(run: Path) -> Iterator[None]:
    """JSON that is whole but not what training wrote trips its readers: then the run is named."""
    try:
        yield
    except NofussError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = "restore them, or train again"
        raise RunError(f"{run} has files that training did not write ({what}); {cure}") from error


def _write(run: Path, collection: Collection, kept: RunEmbeddings) -> Path:
    names = ("config", "environment", "data", "scores", "choice")
    read = {name: read_json(run / f"{name}.json") for name in names}
    seed = int(read["config"].get("seed", 0))
    shown = len(kept.test) > 1
    vectors, rows = (kept.test, kept.test_rows) if shown else (kept.sample, kept.sample_rows)
    tested = shown and not kept.seen
    found = [
        sections.scores(read["scores"]),
        sections.choice(read["choice"].get("choice", {})),
        sections.curves(_read_lines(run / "metrics.jsonl")),
        *neighbourhood(
            Items(collection, rows), vectors, run / "suspects.csv", seed=seed, tested=tested
        ),
        sections.embedding_map(collection, kept, seed=seed),
        sections.bounds(collection, kept),
        sections.data(collection, read["data"]),
        sections.settings(read["config"], read["environment"]),
    ]
    file = run / "report.html"
    filled = [section for section in found if section is not None]
    files.write_file(file, document(_page(run.resolve().name, read, filled)))
    return file


def _page(name: str, read: dict[str, Any], shown: list[Element]) -> Element:
    links = [tag("a", section[0].text, href=f"#{section.get('id')}") for section in shown]
    style = resources.files("nofuss.report").joinpath("report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name} · nofuss"),
        tag("style", style),
    )
    header = tag(
        "header",
        tag("h1", name),
        tag("div", read["data"].get("description", ""), class_="soft"),
        _lead(read["scores"]),
        tag("nav", links, aria_label="Sections"),
    )
    return tag("html", head, tag("body", header, tag("main", shown)), lang="en")


def _lead(scores: dict[str, Any]) -> Element:
    """The result in a sentence."""
    if "recall@1" not in scores:
        return tag("p", "There were no test classes to score this run on.", class_="lead")
    low, high = scores.get("recall@1_interval", (None, None))
    interval = "" if low is None else f" (95% interval {100 * low:.1f} to {100 * high:.1f})"
    model = "a model that has not seen them" if scores.get("folds") else "this model"
    found = (
        f" of {scores['queries']:,} queries from {scores['classes']:,} unseen classes have an item "
        f"of their class as nearest neighbour by {model}{interval}."
    )
    percent = tag("b", f"{100 * scores['recall@1']:.1f}%")
    if "gain" not in scores:
        return tag("p", percent, found, class_="lead")
    return tag("div", tag("p", _worth(scores["gain"]), class_="lead"), tag("p", percent, found))


def _worth(gain: dict[str, Any]) -> str:
    """What the run was worth, paired, in a sentence."""
    low = min(gain["recall@1"][1], gain["map@r"][1])
    high = max(gain["recall@1"][2], gain["map@r"][2])
    verdict = "paid" if low >= 0 else "lost" if high <= 0 else "made little difference"
    return (
        f"Learning {verdict}: {describe_gain(gain)} over the {gain['over']}, on the same queries."
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a run; empty where there is none, for not every run has every file."""
    try:
        return files.read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} is damaged and left out: {error}", stacklevel=2)
        return {}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        lines = files.read_regular(file).decode().splitlines()
        return [files.parse_json(line.encode()) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} is damaged and left out: {error}", stacklevel=2)
        return []
