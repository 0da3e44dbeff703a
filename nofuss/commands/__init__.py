"""The commands of `nofuss`, one file each: read them to know what the product does.

Each file has a function `main`, whose arguments are the flags and whose docstring is the help.
`cli.py` imports only the file of the command that is called.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

RunPath = Annotated[Path, Parameter(name="RUN")]
IndexUrl = Annotated[str | None, Parameter(metavar="URL", show_default="the run's own")]
DeviceName = Annotated[str, Parameter(metavar="NAME")]
