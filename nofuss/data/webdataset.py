"""WebDataset: tar files with the pictures of a data set, one after the other, and their labels.

    train-000.tar    0001.jpg 0001.cls 0002.jpg 0002.cls …     the label beside the picture
                     robin/1.jpg wren/7.jpg …                  or the folder, or a pattern

Files with the same name up to the first dot are one sample; its label is in .cls or .json, a number
or a name. Only headers are read here, in order; a picture is read from its place when it is needed
(`files/parts.py`), so nothing is unpacked. Items keep the order of the shards, so that processes,
which take consecutive items, read different shards.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np

from nofuss.data.collection import Collection, first_five, printable
from nofuss.data.decode import SUFFIXES
from nofuss.data.labelling import BY_FOLDER, Labelling, PassedOver, sides_by_name
from nofuss.data.table import by_number_or_name
from nofuss.data.tar_headers import Member, read_members
from nofuss.errors import DataError
from nofuss.files.atomic import open_regular, parse_json
from nofuss.files.parts import Part, part_path

LARGEST_LABEL = 2**16
"""Bytes of a .cls or .json file."""
LABEL_KEYS = ("label", "cls", "class", "class_name", "category", "target")


class Sample(NamedTuple):
    """A picture in a shard: its place, its name, and its label (or "")."""

    part: Part
    name: str
    label: str


def open_shards(files: Sequence[Path], root: Path, labelling: Labelling = BY_FOLDER) -> Collection:
    """Open the pictures in tar files, in order; their labels as stored, else by their names."""
    passed_over, samples = PassedOver(root), list[Sample]()
    of_file, complaints = list[int](), list[str]()
    for number, file in enumerate(files):
        found = list(_samples(file, passed_over, complaints))
        samples += found
        of_file += [number] * len(found)
    name = printable(files[0].stem if len(files) == 1 else root.name)
    if complaints:
        raise DataError(f"{name} has samples that can't be used: {first_five(complaints)}")
    if not samples:
        raise DataError(f"{name} holds no pictures; expected 0001.jpg, 0001.cls, … in its shards")
    labels, layout = (
        [sample.label for sample in samples],
        f"WebDataset, {len(files):,} shard{'s'[: len(files) > 1]}",
    )
    if not any(labels):
        labels = [labelling.class_of(Path(sample.name)) or "" for sample in samples]
        layout += labelling.describe()
    unlabelled = [sample.name for sample, label in zip(samples, labels, strict=True) if not label]
    if any(labels) and unlabelled:
        names = first_five([printable(each) for each in unlabelled])
        raise DataError(
            f"{name} has samples without a label: {names}; add them, or leave these out"
        )
    compact, class_names = by_number_or_name(labels)
    sides = sides_by_name(files)
    return Collection(
        name=name,
        layout=layout,
        kind="pictures",
        paths=[part_path(sample.part, sample.name) for sample in samples],
        root=root,
        labels=None if unlabelled else compact,
        class_names=() if unlabelled else tuple(printable(each) for each in class_names),
        split=None if sides is None else np.array([sides[number] for number in of_file]),
        notes=passed_over.notes(),
        passed_over=passed_over.listed(),
    )


def _samples(file: Path, passed_over: PassedOver, complaints: list[str]) -> Iterator[Sample]:
    """Yield the pictures of a shard with their labels; note what is neither."""
    try:
        with open_regular(file, limit=2**62) as opened:
            for _, members in groupby(read_members(opened), key=_key):
                picture, label = None, ""
                for member in members:
                    base = PurePosixPath(member.name).name
                    ending, suffix = base.partition(".")[2], PurePosixPath(base).suffix.lower()
                    if member.is_folder:
                        continue
                    if not member.is_regular or base.startswith("."):
                        reason = "links, hidden and special files in shards"
                        passed_over.add(reason, file / member.name)
                    elif suffix in SUFFIXES and picture is None:
                        picture = member
                    elif ending in ("cls", "label", "json"):
                        try:
                            label = label or _label(opened, member)
                        except ValueError as error:
                            where = printable(f"{file.name}/{member.name}")
                            complaints.append(f"{where}: {error}")
                    else:
                        reason = "files in shards that are neither picture nor label"
                        passed_over.add(reason, file / member.name)
                if picture is not None:
                    part = Part(file, picture.start, picture.size)
                    yield Sample(part, picture.name, label)
    except (OSError, ValueError) as error:
        reason = printable(getattr(error, "strerror", None) or str(error))
        raise DataError(f"{printable(file)} is not a readable tar file: {reason}") from error


def _key(member: Member) -> tuple[str, str]:
    """Return what the files of a sample have in common: folder, and name up to the first dot."""
    folder, _, base = member.name.rpartition("/")
    return folder, base.partition(".")[0]


def _label(opened: IO[bytes], member: Member) -> str:
    """Return the label in a .cls or .json file, "" if a .json has none."""
    if member.size > LARGEST_LABEL:
        raise ValueError(f"a label of {member.size:,} bytes")
    opened.seek(member.start)  # `read_members` finds its place again
    content = opened.read(member.size)
    if not member.name.endswith(".json"):
        return content.decode("utf-8", "backslashreplace").strip()
    fields = parse_json(content)
    if not isinstance(fields, dict):
        return ""
    found = (fields[key] for key in LABEL_KEYS if isinstance(fields.get(key), int | str))
    return str(next(found, ""))
