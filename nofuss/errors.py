"""Everything nofuss raises on purpose.

    NofussError               exit 1   caught by the command line, printed as one line
    ├── UsageError            exit 2   an option or a name that does not exist or fit
    ├── DataError             exit 2   data that can't be read or used as asked
    ├── RunError              exit 2   a run directory that can't be opened or overwritten
    ├── TrainingError         exit 1   training that failed while it was running
    ├── EngineError           exit 1   a database that can't be reached, or refuses
    ├── ProcessError          exit 1   another process that ended, hangs or can't be reached
    └── HubError              exit 1   a model hub that can't be reached, or refuses

The library's pure functions raise plain `ValueError` for a caller's mistake;
`UsageError` and `DataError` are `ValueError`s too, so one `except` serves both.
A message is one line: got, expected, and what to do. It may contain names of files, classes and
tensors as they are: `visible` escapes them where they are shown.
"""

import re
import shlex
from collections.abc import Iterable
from difflib import get_close_matches


class NofussError(Exception):
    """Base of all errors that are reported as one line."""

    exit_code = 1


class UsageError(NofussError, ValueError):
    """An option or a name that does not exist or does not fit the others."""

    exit_code = 2


class DataError(NofussError, ValueError):
    """Data that can't be read, or can't be used as asked."""

    exit_code = 2


class RunError(NofussError):
    """A run directory that can't be opened, continued or overwritten."""

    exit_code = 2


class TrainingError(NofussError):
    """Training failed while it was running."""


class EngineError(NofussError):
    """A database that can't be reached, or refuses what is asked of it."""


class ProcessError(NofussError):
    """Another process of the same training ended, hangs or can't be reached."""


class HubError(NofussError):
    """A model hub can't be reached, or refuses."""


def one_line(said: object) -> str:
    """Return what an exception says, which may be several lines, in one."""
    return " ".join(str(said).split())


def visible(text: str) -> str:
    """Return the text with every character escaped that a terminal would act on, or not show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_python(message: str) -> str:
    """Return the message with Python's names for the settings: `--head-lr` is `head_lr`."""
    return re.sub(r"(?<![\w/.-])--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), message)


def command(*words: object) -> str:
    """Return a command line to paste into a shell; every word is quoted where needed."""
    return shlex.join(map(str, words))


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """Return the error for a name that is not among the choices; it suggests the nearest."""
    known = sorted(choices)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {name!r}; {hint}choose from {', '.join(known)}")
