"""The address of a model on the Hub: `hf://user/name`, or `hf://user/name@revision`.

A revision is a branch, a tag or a commit. A commit pins every byte; the address of a loaded model
always has one.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from nofuss.errors import UsageError

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
