"""The commands of `nofuss`, one file each: read them to know what the product does.

Each file has a function `main`, whose arguments are the flags and whose docstring is the help.
`cli.py` imports only the file of the command that is called.
"""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

RunPath = Annotated[Path, Positional, arg(metavar="RUN")]
DeviceName = Annotated[str, arg(metavar="NAME")]
