"""Push files to a repository of the Hub, as one commit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nofuss import __version__
from nofuss.hub.address import Address
from nofuss.hub.client import explained, hub_package


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
