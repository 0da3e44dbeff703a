"""From whatever the user names to a `Collection`."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from nofuss.config import is_named_data
from nofuss.data import benchmarks
from nofuss.data.arrays import open_arrays
from nofuss.data.collection import Collection, first_five, printable
from nofuss.data.decode import SUFFIXES
from nofuss.data.folder import open_folder
from nofuss.data.glyphs import open_glyphs
from nofuss.data.han import open_han
from nofuss.data.labelling import BY_FOLDER, SPLIT_WORDS, Labelling
from nofuss.data.readers.shards import (
    is_saved_dataset,
    open_parquet,
    open_saved_dataset,
    open_shards,
)
from nofuss.data.table import header, open_manifest
from nofuss.data.triplets import PAIR_COLUMNS, open_pairs, open_triplets
from nofuss.errors import DataError

ACCEPTED = (
    "a folder of class folders, a CSV with path,label or anchor,positive,negative or a,b,same, an "
    ".npz or .safetensors file, WebDataset shards (.tar), Parquet, a Hugging Face dataset on disk, "
    "the folder of CUB-200-2011, Cars196 or Stanford Online Products, or the word han"
)


def open_data(
    path: str | Path | None, *, labelling: Labelling = BY_FOLDER, check_values: bool = True
) -> Collection:
    """Recognise the data at `path` and open it; None is the built-in set of characters.

    The word "han", where there is no such file, is the set of `han.py`.

    labelling: how classes are read from the paths of pictures, where these have no labels.
    check_values: refuse vectors with NaN or infinity; False returns them as they are.
    """
    if path is None:
        return open_glyphs()
    if is_named_data(Path(path)):
        return open_han()
    collection = _open(Path(os.path.expanduser(path)), labelling, check_values)
    notes = *collection.notes, *_spelled_twice(collection.class_names)
    return replace(collection, notes=notes)


def _spelled_twice(names: Sequence[str]) -> list[str]:
    """Return a note on classes whose names are the same text, in other code points.

    Such names come from other systems: macOS writes é as e and an accent in names of folders.
    """
    spellings = defaultdict[str, list[str]](list)
    for name in names:
        spellings[normalize("NFC", name)].append(name)
    same = [
        f"{text} ({' and '.join(map(ascii, several))})"
        for text, several in spellings.items()
        if len(several) > 1
    ]
    advice = "give those that are one class one name"
    return [f"classes whose names only look the same: {first_five(same)}; {advice}"] * bool(same)


def _open(path: Path, labelling: Labelling, check_values: bool) -> Collection:
    if os.path.isdir(path):  # unlike path.is_dir(), no error on names too long
        return _open_directory(path.absolute(), labelling)
    if not os.path.isfile(path):
        raise DataError(f"{printable(path)} does not exist; expected {ACCEPTED}")
    path, suffix = path.absolute(), path.suffix.lower()
    if suffix == ".tar":
        return open_shards([path], path.parent, labelling)
    if suffix in (".csv", ".tsv"):
        columns = header(path)
        if "anchor" in columns:
            return open_triplets(path)
        return open_pairs(path) if {*PAIR_COLUMNS} <= {*columns} else open_manifest(path)
    if suffix in (".npz", ".safetensors"):
        return open_arrays(path, check_values=check_values)
    if suffix == ".parquet":
        return open_parquet([path], path.parent)
    if suffix in SUFFIXES:
        raise DataError(f"{printable(path)} is one picture; expected {ACCEPTED}")
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")):
        raise DataError(
            f"{printable(path)} is compressed, so pictures can't be read in any order; unpack it "
            "to a .tar"
        )
    raise DataError(f"can't recognise {printable(path)}; expected {ACCEPTED}")


def _open_directory(folder: Path, labelling: Labelling) -> Collection:
    if layout := benchmarks.layout_of(folder):
        return layout(folder)
    if shards := _inside(folder, ".tar"):
        return open_shards(shards, folder, labelling)
    if is_saved_dataset(folder):
        return open_saved_dataset(folder)
    tables = _inside(folder, ".parquet")
    return open_parquet(tables, folder) if tables else open_folder(folder, labelling)


def _inside(folder: Path, suffix: str) -> list[Path]:
    """Return the files with this suffix in a folder, its data/, train/ or test/, in order."""
    places = [folder, *(folder / name for name in ("data", *sorted(SPLIT_WORDS)))]
    try:
        return sorted(
            file
            for place in places
            if place.is_dir()
            for file in place.iterdir()
            if file.suffix.lower() == suffix and not file.name.startswith(".") and file.is_file()
        )
    except OSError:
        return []  # open_folder says what is wrong
