"""Search: embed a folder once, then find what is like a picture, also in classes not trained on.

index (vectors with names; stored: on disk) or stores/ (in a database)
columns, filter (what a filter sees and says)
items → gallery (which of them changed) → indexing (`nofuss index`)
searcher (order and verdict) → searchable (what a run is searched in)
server, guard, connections → handlers, refusals → shelf, plane (the map): `nofuss serve`
"""

from nofuss.ranking.neighbours import nearest
from nofuss.ranking.open_set import OpenSet, calibrate
from nofuss.search.index import Index

__all__ = ["Index", "OpenSet", "calibrate", "nearest"]
