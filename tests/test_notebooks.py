"""The notebooks run from the first cell to the last, in a folder of their own."""

from pathlib import Path
from typing import Any

import pytest

import nofuss

nbclient = pytest.importorskip("nbclient", reason="needs pip install 'nofuss[notebooks]'")
nbformat = pytest.importorskip("nbformat", reason="needs pip install 'nofuss[notebooks]'")
pytest.importorskip("ipykernel", reason="needs pip install 'nofuss[notebooks]'")
FOLDER = Path(nofuss.__file__).parents[1] / "notebooks"
pytestmark = [
    pytest.mark.notebooks,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="an installed package has no notebooks"),
    pytest.mark.filterwarnings("ignore"),  # of jupyter_client and zmq, about event loops
]


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all cells in `folder`; return what they printed."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / ".runtime"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "strip the outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs: list[Any] = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.get("text", "") for out in outputs)


def number_after(words: str, text: str) -> float:
    return float(text.split(words)[1].split()[0].rstrip(","))


def test_photos_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("photos_to_search.ipynb", tmp_path, monkeypatch)
    assert number_after("new classes: ", said) > number_after("raw pixels ", said)
    assert (tmp_path / "runs" / "characters" / "report.html").is_file()


def test_vectors_to_better_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("vectors_to_better_vectors.ipynb", tmp_path, monkeypatch)
    before, after = (
        number_after(f"{name}Recall@1 ", said.replace("  ", ""))
        for name in ("as they are", "learned")
    )
    assert after > before + 0.2
