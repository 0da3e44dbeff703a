"""The `nofuss` program with a checkpoint after every step, so that a kill loses one at most."""

import sys
from collections.abc import Sequence

from nofuss import cli
from nofuss.training.loop import run_loop


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks; return the exit code."""
    defaults = run_loop.__kwdefaults__
    assert defaults is not None
    defaults["checkpoint_seconds"] = 0.0
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
