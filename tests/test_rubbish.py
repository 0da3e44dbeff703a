"""Rubbish in: what the commands say to it, and how they end. User data stay as they are."""

from pathlib import Path

import pytest

from nofuss.cli import main
from tests.rubbish import foreign_data  # noqa: F401 it fills the catalogue
from tests.rubbish.catalogue import CATALOGUE


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_rubbish(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setenv("COLUMNS", "100")
    make, expected, line = CATALOGUE[name]
    words = [str(word) for word in make(tmp_path)]
    data = {p: p.read_bytes() for p in tmp_path.rglob("*") if is_data(p, tmp_path)}
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    assert code == expected, err
    assert line in (out if expected == 0 else err)
    if code:
        assert len(err.strip().splitlines()) == 1
        assert err.startswith("nofuss: ")
        assert "unexpected" not in err
    assert {p: p.read_bytes() for p in data} == data


def is_data(path: Path, here: Path) -> bool:
    ours = path.relative_to(here).parts[0] in ("run", ".cache")
    return not ours and not path.is_symlink() and path.is_file()
