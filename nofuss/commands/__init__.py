"""The commands of `nofuss`, one file each: read them to know what the product does.

Each file has a function `main`, whose arguments are the flags and whose docstring is the help.
`cli.py` imports only the file of the command that is called.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.errors import UsageError

RunPath = Annotated[Path, Parameter(name="RUN")]
IndexUrl = Annotated[str | None, Parameter(metavar="URL", show_default="the run's own")]
DeviceName = Annotated[str, Parameter(metavar="NAME")]


def check_new_png(flag: str, file: Path) -> None:
    """Raise UsageError unless `file` can be written: a PNG that does not exist yet."""
    if file.suffix.lower() != ".png" or file.exists():
        reason = "exists and is never overwritten" if file.exists() else "does not end in .png"
        raise UsageError(f"{flag} {file} {reason}; give another name")
