"""The `nofuss` program for torchrun to start: with few proxies sharded, and every step saved."""

import sys

from nofuss.training import criterion
from torture.every_step import main

if __name__ == "__main__":
    criterion.SHARD_FROM = 0
    sys.exit(main())
