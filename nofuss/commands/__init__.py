"""One file a command: its flags and what it does. Read them and you know the product.

Each has a function `main`, whose arguments are the flags and whose docstring is the help; `cli.py`
imports the one that is asked for.
"""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

RunPath = Annotated[Path, Positional, arg(metavar="RUN")]
DeviceName = Annotated[str, arg(metavar="NAME")]
