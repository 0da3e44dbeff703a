"""Fetch a model from the Hub, or from its cache where the Hub can't be reached.

Three files are requested, safetensors and JSON; others of the repository are never read. A branch
or a tag is resolved to its commit once, and all files are of that commit. The cache names a file by
the checksum that the Hub has of it, and every load computes it again: a file that was damaged, or
exchanged on the way, is refused.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nofuss.errors import HubError
from nofuss.files.atomic import MANIFEST, memory, read_regular, sha256
from nofuss.hub.address import Address
from nofuss.hub.client import explained, hub_package

FOLDER = "model"
FILES = tuple(f"{FOLDER}/{name}" for name in (MANIFEST, "model.json", "weights.safetensors"))


class Fetched(NamedTuple):
    """A model on this machine, and the address that pins it."""

    folder: Path
    address: Address


def fetch(address: Address) -> Fetched:
    """Return the folder of a model of the Hub; downloads what the cache does not have."""
    download = hub_package().snapshot_download
    with explained(str(address)):
        _check_size(address)
        snapshot = Path(
            download(address.repository, revision=address.revision, allow_patterns=list(FILES))
        )
    if not re.fullmatch(r"[0-9a-f]{40}", snapshot.name):
        raise HubError(f"{address} has no commit that could be pinned; load it from another server")
    for name in FILES:
        if not (snapshot / name).is_file():
            raise HubError(f"{address} has no {name}; give a model that `nofuss push` wrote")
        _verify(snapshot / name)
    return Fetched(snapshot / FOLDER, replace(address, revision=snapshot.name))


def _check_size(address: Address) -> None:
    """Refuse a model that is larger than this machine's memory before it fills the disk."""
    package = hub_package()
    try:
        planned = package.snapshot_download(
            address.repository, revision=address.revision, allow_patterns=list(FILES), dry_run=True
        )
    except package.errors.DryRunError:  # not reachable: what is in the cache was checked before
        return
    if any(file.file_size is None for file in planned):
        raise HubError(f"{address}: its server does not say how large it is; use another server")
    size = sum(file.file_size for file in planned)
    if size > memory():
        raise HubError(
            f"{address} has {size / 1e9:,.1f} GB, more than this machine's memory; "
            "load it on a larger one"
        )


def _verify(file: Path) -> None:
    """Compare a file of the cache with the checksum that is its name; HubError if it differs."""
    stored = file.resolve()
    name = stored.name
    if re.fullmatch(r"[0-9a-f]{64}", name):
        found = sha256(stored)
    elif re.fullmatch(r"[0-9a-f]{40}", name):
        content = read_regular(stored)
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as git does
    else:  # a file system without links holds copies; the manifest is checked when it is loaded
        return
    if found != name:
        raise HubError(f"{stored} is damaged: its checksum differs; delete it and load again")
