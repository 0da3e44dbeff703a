"""The closed form that suits the data: shrinkage, root and centring, chosen on folds of classes.

Whether roots of the features are better than the features, whether to subtract their mean, and how
far the scatter within classes can be trusted differ between collections. Each
candidate is fitted on the other folds and scored on the classes of one; nothing is trained, so all
of it takes seconds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nofuss.config import TrainConfig
from nofuss.model.start import (
    Affine,
    ClassScatter,
    class_scatter,
    joined_scatter,
    signed_root,
    whitened,
    whitened_head,
)
from nofuss.run.choice import SHRINKAGES, Recipe
from nofuss.training.folds import FOLDS, Fold, class_folds, query_scores, sample_rows
from nofuss.training.presets import head_dim

PROBES = (0.85, 0.03)
"""Shrinkages at which roots and centring are compared."""
FEWER_DIMS = (256, 128, 64)
"""Dimensions that folds may prefer where the user asks for none."""
FEW = 0.25
"""Share of the features' dimensions up to which recipes are compared in the head's own."""
SCORED_ITEMS = 800
"""Items of a fold that candidates are scored on: differences between them are paired."""


@dataclass(frozen=True)
class Pinned:
    """What the user has set; None is left to the folds."""

    root: bool | None = None
    center: bool | None = None
    shrinkage: float | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> "Pinned":
        """Read the settings of a configuration."""
        return cls(config.root, config.center, config.shrinkage)

    def candidates(self, shrinkages: Sequence[float]) -> list[Recipe]:
        """Return all recipes that agree with the user's settings, the likeliest first."""
        roots = (True, False) if self.root is None else (self.root,)
        centers = (True, False) if self.center is None else (self.center,)
        alphas = shrinkages if self.shrinkage is None else (self.shrinkage,)
        found = itertools.product(alphas, roots, centers)
        return [Recipe(root, center, alpha) for alpha, root, center in found]


def _rank(recipe: Recipe) -> int:
    """Return the place of a recipe's shrinkage among the candidates; one that is asked for, 0."""
    return SHRINKAGES.index(recipe.shrinkage) if recipe.shrinkage in SHRINKAGES else 0


class ClosedForm:
    """Fits recipes to features (N, F) with labels (N,), on all items or without one fold's.

    dim: of the head that is wanted, at most F; any_dim: or one of FEWER_DIMS, if folds prefer it.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        folds: Sequence[Fold],
        *,
        dim: int,
        any_dim: bool = False,
    ) -> None:
        self.features, self.labels, self.folds, self.dim = features, labels, folds, dim
        fewer = [d for d in FEWER_DIMS if d < dim] if any_dim else []
        self._dims: dict[int, list[float]] = {d: [] for d in (dim, *fewer)}
        self._heads: dict[tuple[Recipe, int | None], Affine] = {}
        self._roots: Tensor | None = None
        self._parts: dict[bool, list[ClassScatter]] = {}
        self._joined: dict[tuple[bool, int | None], ClassScatter] = {}
        self._scores: dict[Recipe, list[float]] = {}

    @classmethod
    def of(cls, config: TrainConfig, features: Tensor, labels: Tensor) -> "ClosedForm":
        """Build it with the folds and the dimension of a resolved configuration."""
        folds = class_folds(labels, FOLDS if config.untrained else int(config.folds or 0))
        any_dim = config.dim is None and not config.untrained
        dim = head_dim(config, features.shape[1])
        return cls(features, labels, folds, dim=dim, any_dim=any_dim)

    def inputs(self, root: bool) -> Tensor:
        """The features, or their roots."""
        if not root:
            return self.features
        if self._roots is None:
            self._roots = signed_root(self.features)
        return self._roots

    def held_out_features(self) -> list[Tensor]:
        """Return the features of each fold's own items."""
        return [self.features[fold.held_out] for fold in self.folds]

    def fit(self, recipe: Recipe, *, without: int | None = None, dim: int | None = None) -> Affine:
        """The head of a recipe, of all items or without those of a fold.

        dim: None for the best of the other folds. Outputs have length 1 on average, whatever the
        scale of the features.
        """
        head, dim = self._whole_head(recipe, without), dim or self.best_dim(without=without)
        affine = Affine(head.weight[:dim], head.bias[:dim])  # leading directions come first
        x = self.inputs(recipe.root)
        length = affine(x if without is None else x[self.folds[without].others]).norm(dim=1).mean()
        return affine.times(1 / max(float(length), torch.finfo(torch.float32).tiny))

    def compare(self, pinned: Pinned) -> None:
        """Score the recipes that the user has left open; `best` then answers.

        Roots and centring first, at a strong and at a weak shrinkage, then all shrinkages of the
        winners: a third of the fits that the whole grid would take.
        """
        probes = pinned.candidates(PROBES)
        self._score(probes)
        likely = {self.best(without=k, among=probes) for k in (None, *range(len(self.folds)))}
        for kind in sorted({(recipe.root, recipe.center) for recipe in likely}):
            self._score(Pinned(*kind, pinned.shrinkage).candidates(SHRINKAGES))
        if len(self._dims) > 1:
            self._score_dims()

    def best(self, *, without: int | None = None, among: Sequence[Recipe] = ()) -> Recipe:
        """The recipe with the highest mean score over the folds, or over all but one."""

        def score(recipe: Recipe) -> float:
            values = [s for k, s in enumerate(self._scores[recipe]) if k != without]
            return sum(values) / len(values)

        return max(sorted(among or self._scores, key=_rank), key=score)  # the first of equal ones

    def best_dim(self, *, without: int | None = None) -> int:
        """The dimension with the highest mean score over the folds, or over all but one."""

        def score(dim: int) -> float:
            return sum(s for k, s in enumerate(self._dims[dim]) if k != without)

        return max(self._dims, key=score)  # of equal ones the largest, which comes first

    def _score_dims(self) -> None:
        """Keep the mean objective of each dimension on each fold, by the recipe of the others."""
        for k, fold in enumerate(self.folds):
            recipe = self.best(without=k)
            rows = sample_rows(self.labels, fold.held_out, SCORED_ITEMS)
            z = self._whole_head(recipe, k)(self.inputs(recipe.root)[rows])
            for dim, scores in self._dims.items():
                found = query_scores(z[:, :dim], self.labels[rows])
                scores.append(float(found.objective.mean()))

    def _whole_head(self, recipe: Recipe, without: int | None) -> Affine:
        """The head in all of `dim` dimensions, fitted once."""
        if (recipe, without) not in self._heads:
            self._heads[recipe, without] = whitened_head(
                self._scatter(recipe.root, without),
                shrinkage=recipe.shrinkage,
                dim=self.dim,
                center=recipe.center,
            )
        return self._heads[recipe, without]

    def _score(self, recipes: Sequence[Recipe]) -> None:
        """Keep the mean objective of each recipe on each fold, fitted on the others."""
        new = [recipe for recipe in recipes if recipe not in self._scores]
        for (root, shrinkage), group in itertools.groupby(new, lambda r: (r.root, r.shrinkage)):
            centers = [recipe.center for recipe in group]
            found = [self._score_fold(k, root, shrinkage, centers) for k in range(len(self.folds))]
            for center, scores in zip(centers, zip(*found, strict=True), strict=True):
                self._scores[Recipe(root, center, shrinkage)] = list(scores)

    def _score_fold(self, k: int, root: bool, shrinkage: float, centers: list[bool]) -> list[float]:
        scatter = self._scatter(root, k)
        rows = sample_rows(self.labels, self.folds[k].held_out, SCORED_ITEMS)
        x = torch.cat([self.inputs(root)[rows], scatter.mean[None].float()])
        # In many dimensions those that are left out hardly matter to the comparison.
        few = self.dim if self.dim <= FEW * x.shape[1] else None
        *_, mean = z = whitened(scatter, x, shrinkage=shrinkage, dim=few)
        labels = self.labels[rows]
        return [
            float(query_scores(z[:-1] - mean if center else z[:-1], labels).objective.mean())
            for center in centers
        ]

    def _scatter(self, root: bool, without: int | None) -> ClassScatter:
        if not self.folds:
            return class_scatter(self.inputs(root), self.labels)
        if root not in self._parts:
            x, rows = self.inputs(root), [fold.held_out for fold in self.folds]
            self._parts[root] = [class_scatter(x[r], self.labels[r]) for r in rows]
        if (root, without) not in self._joined:
            parts = [part for k, part in enumerate(self._parts[root]) if k != without]
            self._joined[root, without] = joined_scatter(parts)
        return self._joined[root, without]
