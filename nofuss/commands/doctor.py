"""`nofuss doctor`: what the data contain, what is wrong with them, and what to run next."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nofuss.commands import console
from nofuss.config import Options

if TYPE_CHECKING:
    from nofuss.report.diagnosis import Diagnosis, Group

_SHOWN = 10  # findings of a kind on the screen; --json has all
_BAR = 40


def main(
    data: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    run: Annotated[Path | None, Parameter(metavar="RUN")] = None,
    class_level: Annotated[
        int | None, Parameter(metavar="N", show_default="the innermost folder")
    ] = None,
    label_pattern: Annotated[
        str | None, Parameter(metavar="REGEX", show_default="the folder")
    ] = None,
    json: bool = False,
) -> None:
    """Find problems in data: unreadable files, copies, doubtful labels. Changes nothing.

    Args:
        data: Any layout that `nofuss train` reads.
        run: A run directory, whose model finds labels that the nearest neighbours contradict.
        class_level: Which of the folders in folders is the class, as for `nofuss train`.
        label_pattern: A regular expression that finds the class in a path, as for `nofuss train`.
        json: Print everything that was found as JSON.
    """
    from nofuss.data.readers.folder import labelling_of  # here, so that --help does not load torch
    from nofuss.report.diagnosis import diagnose_data

    labelling = labelling_of(Options(class_level=class_level, label_pattern=label_pattern))
    found = diagnose_data(data, labelling=labelling, run=run, progress=console.progress)
    if json:
        console.print_json(asdict(found))
    else:
        _show(found)


def _show(diagnosis: "Diagnosis") -> None:
    """Print the findings, most of them in one line each."""
    if diagnosis.per_class:
        low, middle, high = (diagnosis.per_class[name] for name in ("min", "median", "max"))
        console.say(f"items a class: {low:,.0f} to {high:,.0f}, median {middle:,.1f}")
        most = max(count for _, count in diagnosis.histogram)
        width = max(len(step) for step, _ in diagnosis.histogram)
        for step, count in diagnosis.histogram:
            bar = "█" * -(-_BAR * count // most)
            console.say(f"  {step:>{width}} items  {bar} {count:,} classes")
    for note in diagnosis.notes:
        console.say(f"note: {note}")
    unusable = [
        f"{u['item']}: {u['reason']}" + (f" ({u['detail']})" if u["detail"] else "")
        for u in diagnosis.unusable
    ]
    _list("can't be used", unusable)
    for kind, groups in (
        ("copies", diagnosis.duplicates),
        ("look alike", diagnosis.near_duplicates),
    ):
        conflicts = [g for g in groups if len(g.classes) > 1]
        _list(f"{kind}, but labelled differently", [_line(g) for g in conflicts])
        _list(f"{kind}, of one class", [_line(g) for g in groups if len(g.classes) <= 1])
    if diagnosis.doubtful_labels == []:
        console.say("doubtful labels: none; no label is contradicted by its nearest neighbours")
    elif diagnosis.doubtful_labels is not None:
        _list(
            "doubtful labels: the nearest neighbours say otherwise",
            [
                f"{d.item}: {d.label}, neighbours say {d.neighbours_say} ({d.share:.0%})"
                for d in diagnosis.doubtful_labels
            ],
        )
    console.say(f"next: {diagnosis.suggestion}")


def _list(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    console.say(f"{title}: {len(lines):,}")
    for line in lines[:_SHOWN]:
        console.say(f"  {line}")
    if len(lines) > _SHOWN:
        console.say("  … all with --json")


def _line(group: "Group") -> str:
    names = " = ".join(group.items[:4]) + (" = …" if len(group.items) > 4 else "")
    return f"{names} ({', '.join(group.classes)})" if len(group.classes) > 1 else names
