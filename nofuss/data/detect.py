"""From whatever the user names to a `Collection`."""

import os
from pathlib import Path

from nofuss.data import benchmarks
from nofuss.data.arrays import open_arrays
from nofuss.data.collection import Collection, printable
from nofuss.data.folder import PICTURE_SUFFIXES, open_folder
from nofuss.data.glyphs import open_glyphs
from nofuss.data.table import header, open_manifest
from nofuss.data.triplets import PAIR_COLUMNS, open_pairs, open_triplets
from nofuss.errors import DataError

ACCEPTED = (
    "a folder of class folders, a CSV with path,label or anchor,positive,negative or a,b,same, an "
    ".npz or .safetensors file, or the folder of CUB-200-2011, Cars196 or Stanford Online Products"
)


def open_data(path: str | Path | None, *, check_values: bool = True) -> Collection:
    """Recognise the data at `path` and open it; None is the built-in set of characters.

    check_values: refuse vectors with NaN or infinity; False returns them as they are.
    """
    if path is None:
        return open_glyphs()
    path = Path(path).expanduser()
    if os.path.isdir(path):  # unlike path.is_dir(), no error on names too long
        return (benchmarks.layout_of(path) or open_folder)(path.absolute())
    if not os.path.isfile(path):
        raise DataError(f"{printable(path)} does not exist; expected {ACCEPTED}")
    path, suffix = path.absolute(), path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        columns = header(path)
        if "anchor" in columns:
            return open_triplets(path)
        return open_pairs(path) if {*PAIR_COLUMNS} <= {*columns} else open_manifest(path)
    if suffix in (".npz", ".safetensors"):
        return open_arrays(path, check_values=check_values)
    if suffix in PICTURE_SUFFIXES:
        raise DataError(f"{printable(path)} is one picture; expected {ACCEPTED}")
    raise DataError(f"can't recognise {printable(path)}; expected {ACCEPTED}")
