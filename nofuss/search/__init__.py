"""Search: embed a folder once, then find what is like a picture, also in classes not trained on.

index (what an index is): folder (the run's own), engines/ (in a database); filter
update (`nofuss index`), search (`nofuss search`)
verdict: whether anything similar is there
feedback: what people said on the page, and what follows from it
page/ (`nofuss serve`): server, guard → routes, labels → state, map; static/
"""

from nofuss.search.folder import FolderIndex as Index

__all__ = ["Index"]
