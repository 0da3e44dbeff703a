"""Search: embed a folder once, then find what is like a picture, in classes never trained on.

neighbours (the k nearest, exactly) → index (vectors with names, on disk) → gallery (a folder of
pictures kept in step with its index) → commands (`nofuss index`, `nofuss search`)
threshold (from when on nothing is alike) · grid (results as a picture) · approximate (faiss)
"""

from nofuss.search.index import Index
from nofuss.search.neighbours import nearest
from nofuss.search.threshold import Threshold, calibrate

__all__ = ["Index", "Threshold", "calibrate", "nearest"]
