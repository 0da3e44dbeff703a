"""report.html: all that is worth knowing about a run, in one file that requests nothing else.

Its values come from the run directory (config, environment, data, metrics, scores), its embeddings
and the pictures of the collection; report.html in this folder is the template. Doubtful labels and
duplicates are also listed in suspects.csv. Whatever a class or a file is called, it is text, never
markup: autoescape is on for every value, and only the drawings of figures.py arrive as markup.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from nofuss import files
from nofuss.data.collection import Collection
from nofuss.data.scan import find_duplicates
from nofuss.errors import NofussError, RunError
from nofuss.evaluate.findings import doubtful_labels
from nofuss.progress import Progress, silent, working
from nofuss.ranking.neighbours import neighbours
from nofuss.report import sections
from nofuss.run.proxies import RunEmbeddings

log = logging.getLogger("nofuss")
_MISFITS = (AttributeError, LookupError, TypeError, ValueError, OverflowError, UndefinedError)


def write_report(
    run: Path, collection: Collection, shown: RunEmbeddings, *, progress: Progress = silent
) -> Path:
    """Write report.html and suspects.csv of a run; return the path of report.html."""
    with foreign(run):
        names = ("config", "environment", "data", "scores", "choice")
        stored = {name: read_optional_json(run / f"{name}.json") for name in names}
        extra = read_optional_json(run / "model" / "model.json").get("extra", {})
        seed = int(stored["config"].get("seed", 0))
        with working(progress, "drawing the map of the report"):  # t-SNE
            drawn = sections.embedding_map(collection, shown, seed=seed)
        around = _neighbourhood(run, collection, shown, seed, progress)
        with working(progress, "writing the report"):
            page = render(
                "report/report.html",
                title=run.resolve().name,
                description=stored["data"].get("description", ""),
                sections={
                    "scores": sections.scores(stored["scores"], stored["config"].get("preset")),
                    "choices": sections.choices(stored["choice"], extra),
                    "training": sections.training(_metrics(run)),
                    **around,
                    "map": drawn,
                    "bounds": sections.bounds(collection, shown),
                    "data": sections.data(collection, stored["data"]),
                    "settings": sections.settings(stored["config"], stored["environment"], extra),
                },
            )
            files.write_file(run / "report.html", page)
    return run / "report.html"


def _neighbourhood(
    run: Path, collection: Collection, shown: RunEmbeddings, seed: int, progress: Progress
) -> dict[str, sections.Section | None]:
    """Return the sections on neighbours, and write suspects.csv."""
    has_test = len(shown.test) > 1
    vectors, rows = (
        (shown.test, shown.test_rows) if has_test else (shown.sample, shown.proxies.sample)
    )
    if not collection.has_classes or len(vectors) < 3:
        return dict.fromkeys(("neighbours", "confused", "suspects"))
    items, nearest = sections.Items(collection, rows), neighbours(vectors, seed=seed)
    doubts = doubtful_labels(nearest, items.labels)
    exact, near = find_duplicates(collection, progress=progress)
    # Those with different labels come first: at least one of the labels is wrong.
    duplicates = sorted(exact + near, key=lambda group: len({*collection.labels[group]}) < 2)
    files.write_file(run / "suspects.csv", sections.suspects_csv(items, doubts, duplicates))
    tested = has_test and not shown.seen
    return {
        "neighbours": sections.neighbours(items, nearest, seed=seed, tested=tested),
        "confused": sections.confused(items, nearest),
        "suspects": sections.suspects(items, doubts, duplicates),
    }


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Return the epochs in metrics.jsonl; none where it is missing."""
    return [row for row in files.read_lines(run / "metrics.jsonl") if isinstance(row, dict)]


@contextmanager
def foreign(run: Path) -> Iterator[None]:
    """Raise a RunError that names the run where valid JSON is not what training wrote."""
    try:
        yield
    except NofussError:
        raise
    except _MISFITS as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = "restore them, or train again"
        raise RunError(f"{run} has files that training did not write ({what}); {cure}") from error


def render(template: str, **values: Any) -> bytes:
    """Return the page that a template makes of these values; `template` is a path in nofuss/."""
    page = _templates().get_template(template).render(**values)
    # File names may hold surrogates, which UTF-8 can't encode; they become character references.
    return page.encode("utf-8", "xmlcharrefreplace")


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("nofuss", package_path=""),
        autoescape=lambda name: not (name or "").endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": lambda number: f"{number:,}",
        "plain": plain,
        "percent": _percent,
        "breakable": lambda name: Markup("_<wbr>").join(name.split("_")),
        "sentence": lambda words: f"{words[0].upper()}{words[1:]}." if words else "",
    }
    return environment


def _percent(fraction: float, digits: int = 0) -> str:
    return f"{100 * fraction:.{digits}f}"


def plain(text: object) -> str:
    """Return text that can't break out of a line, table cell or code block of Markdown."""
    printable = "".join(c if c.isprintable() else "�" for c in str(text))
    return printable.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where it is missing, or damaged (with a warning)."""
    try:
        return files.read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(f"{file} is damaged and left out: {error}")
        return {}
