"""report.html: being written."""

from pathlib import Path

from nofuss.data.collection import Collection
from nofuss.embeddings import RunEmbeddings


def write_report(run: Path, collection: Collection, kept: RunEmbeddings) -> Path:
    """Write report.html of a run; returns its path."""
    return run / "report.html"
