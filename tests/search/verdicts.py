"""A calibration by the nearest item, made by hand."""

import numpy as np

from nofuss.ranking.open_set import OpenSet


def open_set(**changes: object) -> OpenSet:
    """Known items within cosine 0.9, unknown ones beyond cosine 0.6."""
    values = {
        "rule": "nearest item",
        "auroc": 1.0,
        "rejected": 1.0,
        "false_rejections": 0.05,
        "useful": True,
        "distance": 0.45,
        "known": np.linspace(-1.0, -0.9, 41).tolist(),
        "unknown": np.linspace(-0.6, 0.0, 41).tolist(),
        "items": 100,
        "classes": 10,
    }
    return OpenSet.from_dict(values | changes)
