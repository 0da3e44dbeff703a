"""Search: embed a folder once, then find what is like a picture, in classes never trained on.

neighbours (the k nearest, exactly) → index (vectors with names, on disk) → gallery (a folder of
pictures kept in step with its index) → commands (`nofuss index`, `nofuss search`)
threshold (from when on nothing is alike) · grid (results as a picture) · approximate (faiss)
"""

from nofuss.evaluate.neighbours import nearest
from nofuss.evaluate.threshold import Threshold, calibrate
from nofuss.search.index import Index

__all__ = ["Index", "Threshold", "calibrate", "nearest"]
