"""Models on the Hugging Face Hub: pushed as safetensors and JSON, loaded by `hf://user/name`.

An address may have a revision, `hf://user/name@revision`: a branch, a tag or a commit. A commit
pins every byte; the address of a loaded model always has one. Only the two files of the model are
requested. Both have checksums, which are compared whenever it is opened.

The token comes from HF_TOKEN or `hf auth login` and goes into a header of the requests; no message
of ours contains the text of a request.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nofuss import __version__
from nofuss.errors import HubError, UsageError

FOLDER = "model"
_FILES = (f"{FOLDER}/model.json", f"{FOLDER}/weights-*.safetensors")
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
# pathlib makes one slash of two, and a command line gives paths.
_ADDRESS = re.compile(
    rf"hf:/{{1,2}}(?!.*\.\.)(?![^@]*--)({_PART}/{_PART})(?:@([\w][\w./-]*))?", re.ASCII
)


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
    if found := _ADDRESS.fullmatch(str(path)):
        return Address(*found.groups())
    raise UsageError(f"{path} is not an address on the Hub; expected hf://user/name[@revision]")


def fetch(address: Address) -> tuple[Path, Address]:
    """Return the folder of a model of the Hub, and the address that pins it.

    What the cache of `huggingface_hub` does not have is downloaded.
    """
    download = hub_package().snapshot_download
    with explained(str(address)):
        snapshot = Path(
            download(address.repository, revision=address.revision, allow_patterns=_FILES)
        )
    if not (snapshot / _FILES[0]).is_file():
        raise HubError(f"{address} has no {_FILES[0]}; give a model that `nofuss push` wrote")
    return snapshot / FOLDER, replace(address, revision=snapshot.name)


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
    unreachable = f"can't reach {host}, and it is not in the cache; connect and try again"
    try:
        yield
    except errors.GatedRepoError:
        reason = "its owner gives access on request; ask on its page, then: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"{host} has no such model, or it is private; check the name, or: hf auth login"
    except errors.RevisionNotFoundError:
        reason = "it has no such revision; check what is after the @"
    except errors.LocalEntryNotFoundError:
        reason = unreachable
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"{host} answers with status {status}; try again later"
        if status in (401, 403):
            reason = f"{host} refuses ({status}); use a token that may do this: hf auth login"
    except Exception as error:
        # The HTTP client has changed its name before. An error with a file is one of the disk.
        client = type(error).__module__.split(".")[0]
        is_network = isinstance(error, OSError) and not error.filename
        if not is_network and client not in ("httpx", "httpx2", "httpcore", "requests"):
            raise
        reason = unreachable
    else:
        return
    raise HubError(f"{what}: {reason}")
