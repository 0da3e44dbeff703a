"""`python -m nofuss`."""

import sys

from nofuss.cli import main

sys.exit(main())
