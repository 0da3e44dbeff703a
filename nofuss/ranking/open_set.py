"""Is anything like a picture in an index, and is its class? Two questions, both to class means.

    far(q)  = 1 − max_c x̂·m_c                 x̂: the backbone's features, scaled to length 1
    near(q) = (s₂ + … + s₆) / 10 − s₁         s₁ ≥ s₂ ≥ …: cosines of the learned vector to means

*Nothing similar* is a matter of the raw features, neither centred nor through the head: a head
learns what distinguishes classes and forgets the rest, so that a black square lies between birds.
The limit is the far value that 95% of the index's own items stay within, each taken out of its
mean.

*A good match* is a matter of the learned vectors, where the best class must stand out from the next
five. The limit is what 10% of the unknown reach: items whose class is left out, under a head that
has not seen the class. In an index of classes that training has not seen these are the items
themselves; in one of the training classes, the folds know (training/head.py). Between the two
limits the answer is "not sure", with how many unknown items look as similar.

Why class means and not the nearest items, and what else was tried: docs/lab. An item without a
label is a class of its own.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from nofuss.geometry import normalize

FALSE_REJECTIONS = 0.05
"""Fraction of the index's own items that is "nothing similar"."""
FALSE_MATCHES = 0.1
"""Fraction of unknown items that is a good match."""
RIVALS = 5
"""Class means that the best one must stand out from."""
FEWEST_ITEMS = 5
"""Items from which on it is known how far is far."""
ENOUGH_UNKNOWN, ENOUGH_CLASSES = 20, 4
"""Unknown items, and their classes, from which on it is known how near is near."""
_LEVELS = np.linspace(0, 1, 41)  # of the quantiles that are stored
_PRODUCT = 2**24  # entries of the cosines that are computed at once

Match = Literal["good", "unsure", "nothing", "unknown"]


def class_sums(x: Tensor, codes: Tensor) -> Tensor:
    """Return the sums (C, D) of vectors (N, D) by class 0…C−1, which are means but for length."""
    classes = int(codes.max()) + 1 if len(codes) else 0
    return x.new_zeros(classes, x.shape[1]).index_add_(0, codes, x)


def far(x: Tensor, sums: Tensor, own: Tensor | None = None) -> Tensor:
    """Return 1 − the cosine to the nearest class mean, of unit features (Q, F); sums are (C, F).

    own: (Q,) the class that an item is taken out of, −1 for none.
    """
    return 1 - _best_cosines(x, sums, 1, own)[:, 0]


def near(x: Tensor, sums: Tensor, own: Tensor | None = None, *, unknown: bool = False) -> Tensor:
    """Return half of the mean cosine to the next class means − that to the nearest, (Q,).

    x: unit vectors (Q, D) by the head. unknown: leave out the whole class, not only the item.
    """
    # As many rivals for the unknown, which have a class less.
    rivals = max(0, min(RIVALS, len(sums) - 2))
    best = _best_cosines(x, sums, 1 + rivals, own, whole=unknown)
    return best[:, 1:].sum(1) / (2 * max(1, rivals)) - best[:, 0]


@torch.no_grad()
def _best_cosines(
    x: Tensor, sums: Tensor, count: int, own: Tensor | None, *, whole: bool = False
) -> Tensor:
    """Return the `count` largest cosines to class means, (Q, count), largest first."""
    means, found = normalize(sums), [x.new_empty(0, count)]
    for rows in torch.split(torch.arange(len(x)), max(1, _PRODUCT // len(sums))):
        s = x[rows] @ means.T
        if own is not None:
            inside = rows[own[rows] >= 0]
            rest = sums[own[inside]] - x[inside]
            cosine = (x[inside] * normalize(rest)).sum(1)
            if whole:
                cosine = torch.full_like(cosine, -1.0)
            cosine[torch.linalg.vector_norm(rest, dim=1) < 1e-4] = -1.0  # it is alone
            s[inside - rows[0], own[inside]] = cosine
        found.append(s.topk(count).values)
    return torch.cat(found)


def quantiles(unknown: Tensor, classes: int) -> list[float] | None:
    """Return what is stored of the near values of unknown items (N,) of some classes.

    None where they are too few to say anything.
    """
    if len(unknown) < ENOUGH_UNKNOWN or classes < ENOUGH_CLASSES:
        return None
    found: list[float] = np.quantile(unknown.double().numpy(), _LEVELS).tolist()
    return found


@dataclass(frozen=True)
class OpenSet:
    """The limits of one index, and what lies beyond them."""

    far_limit: float
    """The far value that 95% of the index's items stay within."""
    unknown: list[float] | None
    """Quantiles of the near values of unknown items; None where there were too few."""
    items: int
    """Those that the first limit is of."""
    classes: int

    def __post_init__(self) -> None:
        if self.unknown is not None and not are_quantiles(self.unknown):
            raise ValueError("holds for unknown items what are no quantiles")

    @classmethod
    def of(cls, raw: Tensor, codes: Tensor, unknown: list[float] | None) -> Self | None:
        """Calibrate on unit features (N, F) of classes 0…C−1; None for too few items."""
        if len(raw) < FEWEST_ITEMS:
            return None
        values = far(raw, class_sums(raw, codes), codes).double().numpy()
        limit = float(np.quantile(values, 1 - FALSE_REJECTIONS))
        return cls(limit, unknown, len(raw), len(torch.unique(codes)))

    @property
    def near_limit(self) -> float | None:
        """The near value that 10% of unknown items stay within; None where there were too few."""
        if self.unknown is None:
            return None
        return float(np.interp(FALSE_MATCHES, _LEVELS, self.unknown))

    def fraction(self, near_value: float) -> float | None:
        """Return the fraction of unknown items that look at least as similar."""
        if self.unknown is None:
            return None
        return float(np.interp(near_value, self.unknown, _LEVELS))

    def judge(self, far_value: float | None, near_value: float) -> tuple[Match, str]:
        """Return the answer for a query, as a word and as a sentence.

        far_value: None for an item of the index, of which that need not be asked.
        """
        if far_value is not None and far_value > self.far_limit:
            return "nothing", "Nothing similar found."
        fraction = self.fraction(near_value)
        if fraction is None:
            return "unsure", "Not sure: too few classes are known to say what a good match is."
        if fraction > FALSE_MATCHES:
            return "unsure", f"Not sure: {_of_unknown(fraction)} this similar."
        if fraction > _LEVELS[1]:
            return "good", "Good match: unrelated pictures seldom look this similar."
        return "good", "Good match: unrelated pictures almost never look this similar."

    def describe(self) -> str:
        """Return one line for the user."""
        found = (
            'search says "nothing similar" to what is less like any class here than '
            f"{1 - FALSE_REJECTIONS:.0%} of the {self.items:,} items that were looked at"
        )
        if self.unknown is None:
            return f'{found}; too few classes are known to tell a "good match"'
        return f'{found}, and "good match" to {FALSE_MATCHES:.0%} of the pictures of other classes'


def are_quantiles(values: Any) -> bool:
    """Return whether stored values are what `quantiles` gives."""
    if not isinstance(values, list) or len(values) != len(_LEVELS):
        return False
    return all(type(v) in (int, float) and math.isfinite(v) for v in values)


_MANY = {"nearly all": 0.95, "three in four": 0.75, "two in three": 2 / 3, "half of the": 0.5}
_ONE_IN = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}


def _of_unknown(fraction: float) -> str:
    """Return words like "one in three unrelated pictures looks"."""
    if fraction >= 0.4:
        words = min(_MANY, key=lambda words: abs(_MANY[words] - fraction))
        return f"{words} unrelated pictures look"
    count = round(1 / fraction)
    return f"one in {_ONE_IN.get(count, count)} unrelated pictures looks"
