"""Fetch a model from the Hub, or from its cache where the Hub can't be reached.

Two files are requested, model.json and the weights that it names; others of the repository are
never read. A branch or a tag is resolved to its commit once, and both files are of that commit. The
cache names a file by
the checksum that the Hub has of it, and every load computes it again: a file that was damaged, or
exchanged on the way, is refused.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nofuss.errors import HubError
from nofuss.files import memory, read_bytes, read_json, sha256
from nofuss.hub.address import Address
from nofuss.hub.client import explained, hub_package

FOLDER = "model"
DESCRIPTION = f"{FOLDER}/model.json"


class Fetched(NamedTuple):
    """A model on this machine, and the address that pins it."""

    folder: Path
    address: Address


def fetch(address: Address) -> Fetched:
    """Return the folder of a model of the Hub; downloads what the cache does not have."""
    snapshot = _download(address, DESCRIPTION)
    if not re.fullmatch(r"[0-9a-f]{40}", snapshot.name):
        raise HubError(f"{address} has no commit that could be pinned; load it from another server")
    pinned = replace(address, revision=snapshot.name)
    try:
        checksum = str(read_json(snapshot / DESCRIPTION).get("weights"))
    except (OSError, ValueError) as error:
        raise HubError(f"{pinned}: {DESCRIPTION} is damaged ({error}); load another") from None
    if re.fullmatch("[0-9a-f]{64}", checksum):  # else loading says what is wrong with it
        _download(pinned, f"{FOLDER}/weights-{checksum[:16]}.safetensors")
    return Fetched(snapshot / FOLDER, pinned)


def _download(address: Address, name: str) -> Path:
    """Return the snapshot with one file of the repository, verified."""
    download = hub_package().snapshot_download
    with explained(str(address)):
        _check_size(address, name)
        snapshot = Path(
            download(address.repository, revision=address.revision, allow_patterns=[name])
        )
    if not (snapshot / name).is_file():
        raise HubError(f"{address} has no {name}; give a model that `nofuss push` wrote")
    _verify(snapshot / name)
    return snapshot


def _check_size(address: Address, name: str) -> None:
    """Refuse a model that is larger than this machine's memory before it fills the disk."""
    package = hub_package()
    try:
        planned = package.snapshot_download(
            address.repository, revision=address.revision, allow_patterns=[name], dry_run=True
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
        content = read_bytes(stored)
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as git does
    else:  # a file system without links holds copies; the weights are checked when they are loaded
        return
    if found != name:
        raise HubError(f"{stored} is damaged: its checksum differs; delete it and load again")
