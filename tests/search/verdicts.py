"""A calibration by the nearest item, made by hand."""

import numpy as np

from nofuss.evaluate.strangers import Strangers


def strangers(**changes: object) -> Strangers:
    """Known items within cosine 0.9, strangers beyond cosine 0.6."""
    values = {
        "rule": "nearest item",
        "auroc": 1.0,
        "rejected": 1.0,
        "denied": 0.05,
        "useful": True,
        "distance": 0.45,
        "known": np.linspace(-1.0, -0.9, 41).tolist(),
        "strangers": np.linspace(-0.6, 0.0, 41).tolist(),
        "items": 100,
        "classes": 10,
    }
    return Strangers.from_dict(values | changes)
