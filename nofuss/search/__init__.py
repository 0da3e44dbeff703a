"""Search: embed a folder once, then find what is like a picture, also in classes not trained on.

index (what an index is): folder (the run's own), engines/ (in a database); filter
update (`nofuss index`), search (`nofuss search`), searchable (what a run is searched in)
page/ (`nofuss serve`): server, guard → handlers, refusals → shelf, plane (the map)
"""

from nofuss.ranking.neighbours import nearest
from nofuss.ranking.open_set import OpenSet, calibrate
from nofuss.search.folder import FolderIndex as Index

__all__ = ["Index", "OpenSet", "calibrate", "nearest"]
