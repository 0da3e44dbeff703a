"""What a report shows of a run without test items."""

import numpy as np

from nofuss.run.proxies import RunEmbeddings, RunProxies


def nothing_to_show(dim: int) -> RunEmbeddings:
    """Neither items nor proxies."""
    vectors, rows = np.empty((0, dim), np.float32), np.empty(0, np.int64)
    return RunEmbeddings(vectors, rows, vectors, RunProxies.none(dim))
