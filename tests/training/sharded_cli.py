"""The `nofuss` program, with proxies dealt out even where there are few: for torchrun to start."""

import sys

from nofuss.cli import main
from nofuss.training import setup

if __name__ == "__main__":
    setup.SHARD_FROM = 0
    sys.exit(main())
