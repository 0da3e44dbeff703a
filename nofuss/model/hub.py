"""Models on the Hugging Face Hub: pushed as safetensors and JSON, loaded by `hf://user/name`.

An address may have a revision, `hf://user/name@revision`: a branch, a tag or a commit. A commit
pins every byte; the address of a loaded model always has one. Two files are requested, model.json
and the weights that it names; others of the repository are never read. The cache of
`huggingface_hub` names a file by the checksum that the Hub has of it, and every load computes it
again: a file that was damaged on the way is refused.

The token comes from HF_TOKEN or `hf auth login` and goes into a header of the requests; no message
of ours contains the text of a request.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nofuss import __version__
from nofuss.errors import HubError, UsageError
from nofuss.files import memory, read_bytes, read_json, sha256

FOLDER = "model"
DESCRIPTION = f"{FOLDER}/model.json"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"{_PART}/{_PART}", re.ASCII)
# pathlib makes one slash of two, and a command line gives paths.
_ADDRESS = re.compile(r"hf:/{1,2}(?P<repository>[^@]*)(?:@(?P<revision>.*))?", re.DOTALL)
_REVISION = re.compile(r"[\w][\w./-]{0,200}", re.ASCII)


@dataclass(frozen=True)
class Address:
    """A repository on the Hub, at a revision if there is one."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repository}{at}"


def is_address(path: str | Path) -> bool:
    """Return whether this names a model on the Hub rather than a folder."""
    return str(path).startswith("hf:/")


def parse_address(path: str | Path) -> Address:
    """Return the parts of `hf://user/name[@revision]`; UsageError if it is something else."""
    found = _ADDRESS.fullmatch(str(path))
    if not found or not _is_valid(found["repository"]):
        raise UsageError(f"{path} is not an address on the Hub; expected hf://user/name[@revision]")
    revision = found["revision"]
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UsageError(f"{path}: expected a branch, a tag or a commit after the @")
    return Address(found["repository"], revision)


def parse_repository(name: str) -> str:
    """Return the name of a repository, with or without `hf://`; UsageError if it is none."""
    text = str(parse_address(name).repository) if is_address(name) else name
    if not _is_valid(text):
        raise UsageError(f"{name!r} is not a repository of the Hub; expected user/name")
    return text


def _is_valid(repository: str) -> bool:
    return bool(_REPOSITORY.fullmatch(repository)) and not re.search(r"--|\.\.", repository)


# Loading and pushing


def fetch(address: Address) -> tuple[Path, Address]:
    """Return the folder of a model of the Hub, and the address that pins it.

    What the cache of `huggingface_hub` does not have is downloaded.
    """
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
    return snapshot / FOLDER, pinned


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


def upload(
    files: Mapping[str, bytes | Path], repository: str, *, public: bool, message: str
) -> Address:
    """Make the repository where there is none, add the files, and return the pinned address.

    Other files in folders of these, as the weights of a former model, are deleted.

    files: name in the repository → content. public: for a new repository; one that exists stays as
    it is.
    """
    package = hub_package()
    operations: list[Any] = [
        package.CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    api = package.HfApi(library_name="nofuss", library_version=__version__)
    with explained(f"hf://{repository}"):
        api.create_repo(repository, private=not public, exist_ok=True)
        folders = {name.rpartition("/")[0] for name in files} - {""}
        for name in api.list_repo_files(repository):
            if name not in files and name.rpartition("/")[0] in folders:
                operations.append(package.CommitOperationDelete(name))
        commit = api.create_commit(repository, operations, commit_message=message)
    return Address(repository, commit.oid)


# The package `huggingface_hub`


def hub_package() -> ModuleType:
    """Return the package; UsageError if it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            "models on the Hub need another package: pip install 'nofuss[hub]'"
        ) from None
    module: ModuleType = huggingface_hub
    return module


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise HubError, with what to do, for what `huggingface_hub` raises."""
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        reason = "its owner gives access on request; ask on its page, then: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"{host} has no such model, or it is private; check the name, or: hf auth login"
    except errors.RevisionNotFoundError:
        reason = "it has no such revision; check what is after the @"
    except errors.LocalEntryNotFoundError:
        reason = f"can't reach {host}, and it is not in the cache; connect and try again"
    except errors.EntryNotFoundError:
        reason = "it has no files of nofuss; give a model that `nofuss push` wrote"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = f"{host} refuses ({status}); use a token that may do this: hf auth login"
        else:
            reason = f"{host} answers with status {status}; try again later"
    except OSError as error:
        if error.filename or isinstance(error, errors.CacheNotFound):
            raise  # the disk, not the network
        reason = f"can't reach {host} ({type(error).__name__}); connect and try again"
    except Exception as error:
        if not _is_of_network(error):
            raise
        reason = f"can't reach {host} ({type(error).__name__}); connect and try again"
    else:
        return
    raise HubError(f"{what}: {reason}")


def _is_of_network(error: Exception) -> bool:
    """Return whether an error is of the HTTP client, which has changed its name before."""
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
