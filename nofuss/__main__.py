"""The program: `nofuss`, or `python -m nofuss`."""

import gc
import sys

from nofuss.cli import main


def program() -> None:
    """Do what the command line asks, and exit."""
    code = main()
    if "triton" not in sys.modules:  # whose bindings would print what was not freed
        gc.freeze()  # or the interpreter searches all of torch for garbage before it exits
    sys.exit(code)


if __name__ == "__main__":
    program()
