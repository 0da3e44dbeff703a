"""What a run keeps of its features, and why: choice.json, decided by folds of the classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nofuss.evaluate.intervals import in_points
from nofuss.evaluate.protocol import score_title
from nofuss.model.whitening import Recipe

NOTHING, CLOSED, TRAINED = "untrained features", "closed form", "trained"
"""The heads on fixed features."""
BEFORE = "before training"
"""The network that a fine-tuning run keeps where held-out classes lost by training."""
UNTRAINED = Recipe(root=False, shrinkage=1.0)
"""The unchanged features."""


@dataclass(frozen=True)
class Choice:
    """The head that is kept, and the scores on folds behind it."""

    kept: str
    recipe: Recipe
    dim: int
    folds: int = 0
    """0 where there are too few classes, or nothing was to be decided."""
    classes: int = 0
    items: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """Method → Recall@1 and MAP@R on the folds."""
    gains: dict[str, dict[str, Sequence[float]]] = field(default_factory=dict)
    """"a over b" → score → mean difference and its 95% interval over classes."""

    def describe(self) -> list[str]:
        """Return lines for the user: what the folds found, and what is kept."""
        kept = f"{self.kept}, {self.dim} dimensions ({4 * self.dim:,} bytes per item)"
        if self.kept != NOTHING:
            kept += f", shrinkage {self.recipe.shrinkage:g}, emphasis {self.recipe.emphasis:g}"
        if not self.scores:
            return [f"head: {kept}"]
        found = ", ".join(
            f"{name} {100 * of['recall@1']:.2f} / {100 * of['map@r']:.2f}"
            for name, of in self.scores.items()
        )
        return [
            f"Recall@1 / MAP@R on {self.classes:,} training classes, each held out in one of "
            f"{self.folds} folds: {found}",
            f"kept: {kept}; {self.reason()}",
        ]

    def reason(self) -> str:
        """Return in words what the closed form, or training after it, changes."""
        what, pair = "the closed form", f"{CLOSED} over {NOTHING}"
        if self.kept == TRAINED:
            what, pair = "training", f"{TRAINED} over {CLOSED}"
        changes = " and ".join(
            f"{score_title(name)} by {in_points(self.gains[pair][name])}"
            for name in ("recall@1", "map@r")
        )
        return f"{what} changes {changes}"


@dataclass(frozen=True)
class Networks:
    """Which networks are kept of those that were tried, and why."""

    kept: str
    """The name of one, or of several with + between."""
    cheapest: str
    scores: dict[str, dict[str, float]]
    """Networks → Recall@1 and MAP@R of the closed form on the folds."""
    gains: dict[str, Sequence[float]]
    """Score → what is kept gains over the cheapest: mean difference and its 95% interval."""
    milliseconds: dict[str, float]
    """Networks → time of a picture on the machine of the training."""

    def describe(self) -> str:
        """Return what is kept, what it gains and what it costs."""
        kept, cost = self.kept.replace("+", " + "), f"{self.milliseconds[self.kept]:.0f} ms a photo"
        if self.kept == self.cheapest:
            return f"network: {kept} ({cost}); folds gain nothing significant by the others"
        gains = " and ".join(f"{name} by {in_points(gain)}" for name, gain in self.gains.items())
        return (
            f"networks: {kept} ({cost} instead of {self.milliseconds[self.cheapest]:.0f}), which "
            f"change {gains} over {self.cheapest} on folds"
        )

    def table(self) -> list[tuple[str, float, float, float]]:
        """Return networks, Recall@1, MAP@R, and milliseconds a picture of all that were tried."""
        return [
            (name.replace("+", " + "), of["recall@1"], of["map@r"], self.milliseconds[name])
            for name, of in self.scores.items()
        ]
