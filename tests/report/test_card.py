"""The model card that training writes."""

import json
from pathlib import Path

from nofuss.report.card import model_card
from nofuss.run.directory import Run, create_run
from tests.asked import settings_of


def test_training_writes_a_card(vector_run: Path) -> None:
    path = vector_run
    card = (path / "README.md").read_text()
    scores = json.loads((path / "scores.json").read_text())
    low, high = scores["recall@1_interval"]
    shown = f"{100 * scores['recall@1']:.2f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert f"| recall@1 | {shown} |" in card
    for heading in ("Data", "Scores", "Use", "Limits", "How it was made"):
        assert f"\n## {heading}\n" in card
    assert f"nofuss.load({str(path)!r})" in card
    assert "embedding of vectors" in card


def test_a_card_of_little_is_still_a_card(tmp_path: Path) -> None:
    """No scores, no data.json, names full of markup."""
    run = create_run(settings_of(out=tmp_path / "a|b<i>`"), name="")
    card = model_card(Run(run.path, Run.open(run.path).config))
    assert card.startswith("# a\\|b&lt;i>'\n")
    assert "nothing was held out" in card
