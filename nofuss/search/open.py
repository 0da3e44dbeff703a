"""Open what a run is searched in, for `nofuss search` and the page alike.

That is the run's own index, which holds the trained pictures from the beginning and what `nofuss
index` added, or the database that the user names. The data are never opened for it.
"""

from dataclasses import dataclass

from nofuss.errors import DataError, RunError, command
from nofuss.model.encoder import Encoder, load
from nofuss.model.saved import model_digest
from nofuss.run.directory import Run
from nofuss.search.engines import open_engine
from nofuss.search.feedback import Feedback, corrected, read_feedback
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Index


@dataclass(frozen=True)
class Searched:
    """An index, the model whose vectors it holds, and what people said of both."""

    encoder: Encoder
    """As it was trained."""
    stored: Index
    """As it is kept, with the map in force that feedback taught."""
    feedback: Feedback
    """None in a database."""

    @property
    def index(self) -> Index:
        """The index with the labels that are corrected."""
        if isinstance(self.stored, FolderIndex):
            return corrected(self.stored, self.feedback)
        return self.stored


def open_search(run: Run, url: str | None = None) -> Searched:
    """Open a run's model with its own index, or with the one in the database at a URL."""
    encoder = load(run.path, feedback=False)
    try:
        index = _open(run, encoder, url)
    except RunError:
        if model_digest(run.model) == encoder.digest:
            raise
        return open_search(run, url)  # another command has just replaced the model
    if not index.count():
        index.close()
        cure = f"{command('nofuss', 'index', run.path)} DIR{' --to URL' if url else ''}"
        raise DataError(f"the index in {index.place} is empty; add pictures: {cure}")
    return Searched(encoder, index, Feedback() if url else read_feedback(run.path))


def _open(run: Run, encoder: Encoder, url: str | None) -> Index:
    wanted = About(encoder.digest, encoder.dim)
    if url is not None:
        return open_engine(url, flag="--index", wanted=wanted)
    index = FolderIndex.open(run.index, wanted.model)
    if index.about.dim != wanted.dim:
        raise RunError(
            f"{index.place} holds vectors of {index.about.dim} dimensions, but the model gives "
            f"{wanted.dim}; delete the folder and make it again: nofuss index RUN DIR"
        )
    return index
