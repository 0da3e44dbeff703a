"""Files of ours: written whole or not at all, read only if regular, one writer at a time."""

import sys

if sys.platform == "win32":
    raise ImportError(
        "nofuss opens folders and locks files in ways that Windows does not have; use WSL 2 there. "
        "nofuss.losses, nofuss.proxies and nofuss.evaluate work without"
    )
