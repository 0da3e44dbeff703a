"""What a run keeps, and why: choice.json, decided by folds of the training classes."""

from dataclasses import asdict, dataclass
from typing import Any

NOTHING, CLOSED, TRAINED = "untrained features", "closed form", "trained"
"""The three heads that are compared."""
BEFORE = "before training"
"""The network that a fine-tuning run keeps where held-out classes lost by training."""
SHRINKAGES = (0.85, 0.7, 0.95, 0.5, 0.3, 0.1, 0.03, 0.005, 1.0)
"""Candidates for α. Among equal ones the first wins: strong shrinkage is the safer choice."""


@dataclass(frozen=True)
class Recipe:
    """How features become an embedding in closed form."""

    root: bool = True
    """Take the features' signed roots first."""
    center: bool = True
    """Subtract the mean of the training items."""
    shrinkage: float = SHRINKAGES[0]
    """α of model/start.py: 1 leaves the features as they are."""

    def describe(self) -> str:
        """Describe the recipe in a few words."""
        return ", ".join(
            [
                f"shrinkage {self.shrinkage:g}",
                "roots of the features" if self.root else "features as they are",
                "centred" if self.center else "not centred",
            ]
        )


UNTRAINED = Recipe(root=False, center=False, shrinkage=1.0)
"""The unchanged features."""


@dataclass(frozen=True)
class Choice:
    """What is kept and why; stored in choice.json."""

    kept: str
    recipe: Recipe
    dim: int
    folds: int
    classes: int
    items: int
    scores: dict[str, dict[str, float]]
    """Method → Recall@1 and MAP@R on the folds."""
    gains: dict[str, dict[str, tuple[float, float, float]]]
    """"a over b" → score → mean difference and its 95% interval over classes."""
    curve: list[tuple[int, float, float]]

    def describe(self) -> list[str]:
        """Return lines for the user: what the folds found, and what is kept."""
        if not self.scores:
            return [f"head: {self.kept} in {self.dim} dimensions, {self.recipe.describe()}"]
        parts = [
            f"{name} {100 * of['recall@1']:.2f} / {100 * of['map@r']:.2f}"
            for name, of in self.scores.items()
        ]
        return [
            f"Recall@1 / MAP@R on {self.classes:,} training classes, each held out in one of "
            f"{self.folds} folds: " + ", ".join(parts),
            self.reason(),
        ]

    def reason(self) -> str:
        """Return what is kept, and why, in a sentence."""
        if self.kept == NOTHING:
            gain = self.gains[f"{CLOSED} over {NOTHING}"]["recall@1"]
            why = f"the closed form changes Recall@1 by {_points(gain)}"
            return f"kept: the untrained features in {self.dim} dimensions, since {why}"
        what = f"{self.dim} dimensions ({4 * self.dim:,} bytes an item), {self.recipe.describe()}"
        pair = self.gains.get(f"{TRAINED} over {CLOSED}")
        if pair is None:
            return f"kept: the closed form in {what}"
        why = f"Recall@1 by {_points(pair['recall@1'])}, MAP@R by {_points(pair['map@r'])}"
        if self.kept == TRAINED:
            return f"kept: the trained head in {what}, since training changes {why}"
        return f"kept: the closed form in {what}, since training would change {why}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Choice":
        """Build a choice from what `as_dict` returned.

        KeyError, TypeError, ValueError or AttributeError for anything else.
        """
        gains = {
            pair: {name: (float(m), float(low), float(high)) for name, (m, low, high) in of.items()}
            for pair, of in stored["gains"].items()
        }
        curve = [(int(e), float(r), float(m)) for e, r, m in stored["curve"]]
        for name in ("dim", "folds", "classes", "items"):
            if type(stored[name]) is not int or not 0 <= stored[name] < 2**31:
                raise ValueError(f"{name} is {stored[name]!r:.60}")
        if stored["kept"] not in (NOTHING, CLOSED, TRAINED) or not stored["dim"]:
            raise ValueError(f"kept is {stored['kept']!r:.60}, in {stored['dim']} dimensions")
        scores = {
            name: {each: float(of[each]) for each in ("recall@1", "map@r")}
            for name, of in stored["scores"].items()
        }
        recipe, kept = Recipe(**stored["recipe"]), {"gains": gains, "curve": curve}
        kinds = type(recipe.root), type(recipe.center), type(recipe.shrinkage)
        if kinds[:2] != (bool, bool) or kinds[2] not in (int, float):
            raise ValueError(f"recipe is {stored['recipe']!r:.60}")
        if not 0 <= recipe.shrinkage <= 1:
            raise ValueError(f"shrinkage is {recipe.shrinkage!r:.60}")
        return cls(**{**stored, "recipe": recipe, "scores": scores, **kept})


def _points(gain: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in gain)
    return f"{mean:+.2f} points (95%: {low:+.2f} to {high:+.2f})"
