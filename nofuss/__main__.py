"""The program: `nofuss`, or `python -m nofuss`."""

import gc
import os
import sys


def program() -> None:
    """Do what the command line asks, and exit."""
    # Before torch is loaded: threads that wait sleep instead of spinning, or beside another busy
    # process a training takes twice as long and more (docs/faq.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from nofuss.cli import main

        code = main()
    except KeyboardInterrupt:  # before `main` says so itself
        sys.exit(130)
    if "triton" not in sys.modules:  # whose bindings would print what was not freed
        gc.freeze()  # or the interpreter searches all of torch for garbage before it exits
    sys.exit(code)


if __name__ == "__main__":
    program()
