"""Is the query's class here at all? A novelty score, and what it means in a given index.

The distance to the nearest item alone lets most unknown classes through. Two things help (Mensink
et al. 2013 on class means; local density as in Breunig et al. 2000 and the cohorts of speaker
verification): the nearest *class mean* varies less than the nearest item, and how near an item must
be depends on how crowded the place is. Which rule is best differs between collections, so folds of
training classes choose.

What a value means depends on the index, on how many classes it has and how alike they are. It is
calibrated on the index itself: every item (or a sample of them) is searched once without its own
class, as a query of an unknown class, and once without another class, as a query of a known one, so
that both see as many. The threshold is the novelty below which 95% of the known lie: a wrong
"nothing" is the mistake that hurts. Where that rejects hardly more unknown classes than a coin
would, the answer is "can't tell".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from nofuss.evaluate.intervals import paired_difference
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.ranking.neighbours import Vicinity, leave_one_out

FALSE_REJECTIONS = 0.05
"""Fraction of the items of known classes that may be rejected."""
ENOUGH_ITEMS, ENOUGH_CLASSES = 20, 5
"""Fewer items or classes say nothing about others."""
FIRM_CLASSES = 20
"""With fewer classes fractions are called rough."""
ENOUGH_IN_FOLD = 3
"""Classes of a fold, so that two are left where one is left out; folds are pooled."""
SAMPLE, SAMPLE_OF_FOLD = 500, 250
"""Items of an index that it is calibrated on, and of a fold that rules are compared on."""
CROWD = 10, 50
"""Ranks from and up to which neighbours say how crowded the place is; fewer in a small index."""
_LEVELS = np.linspace(0, 1, 41)  # of the quantiles that are stored; one is 1 − FALSE_REJECTIONS

Confidence = Literal["here", "perhaps", "nothing", "unknown"]


@torch.no_grad()
def nearest_class(around: Vicinity, labels: Tensor) -> Tensor:
    """Return the cosine to the nearest class mean within the vicinity, (Q,).

    labels (Q, M): codes of the items, below 0 for items without a class, which stand alone.
    """
    same = (labels[:, :, None] == labels[:, None]) & (labels >= 0)[:, None]
    same |= torch.eye(labels.shape[1], dtype=torch.bool)
    member = (same & around.exists[:, None]).float()  # (Q, M, M): j is of i's class
    to_class = (around.gram * member).sum(2)  # xᵢ·Σx of its class, whose sum is |Σx|²
    sums = member @ torch.stack([around.near, to_class], 2)
    cosine = sums[..., 0] / sums[..., 1].clamp_min(1e-12).sqrt()
    return cosine.masked_fill(~around.exists, -1.0).amax(1)


def background(around: Vicinity) -> Tensor:
    """Return the mean cosine to items that are near but not the nearest, (Q,)."""
    counts = around.exists.sum(1, keepdim=True)
    first, stop = (counts // 10).clamp_max(CROWD[0]), ((counts + 1) // 2).clamp_max(CROWD[1])
    place = torch.arange(around.near.shape[1])
    crowd = (place >= first) & (place < stop) & around.exists
    return (around.near * crowd).sum(1) / crowd.sum(1).clamp_min(1)


def _nearest_item(around: Vicinity, labels: Tensor) -> Tensor:
    return -around.near.masked_fill(~around.exists, -1.0).amax(1)


RULES: dict[str, Callable[[Vicinity, Tensor], Tensor]] = {
    "nearest item": _nearest_item,
    "nearest class mean": lambda around, labels: -nearest_class(around, labels),
    "class mean, half density": lambda around, labels: (
        background(around) / 2 - nearest_class(around, labels)
    ),
    "class mean, density": lambda around, labels: (
        background(around) - nearest_class(around, labels)
    ),
}
"""Name → novelty (Q,) of queries by their vicinity and the labels (Q, M) of its items."""


@dataclass(frozen=True)
class OpenSet:
    """A rule, and what its values mean in one index (or among held-out classes)."""

    rule: str
    auroc: float
    """Chance that an item of an unknown class has a higher novelty than one of a known class."""
    rejected: float
    """Fraction of the items of unknown classes beyond the threshold."""
    false_rejections: float
    """Fraction of the items of known classes beyond the threshold."""
    useful: bool
    """Whether it rejects twice as many unknown items as known, with 95% confidence over classes."""
    distance: float
    """The distance within which 95% of the items of known classes have their nearest."""
    known: list[float]
    """Quantiles of the novelty of items whose class is in the index."""
    unknown: list[float]
    """Quantiles of the novelty of items whose class is not."""
    items: int
    classes: int

    @property
    def threshold(self) -> float:
        """The novelty beyond which the answer is "nothing like this"."""
        return self.known[round((1 - FALSE_REJECTIONS) * (len(_LEVELS) - 1))]

    def describe(self) -> str:
        """Return one line for the user."""
        if not self.useful:
            return (
                "search can't recognise unknown classes here, so it never says \"nothing like "
                f'this": of {self.classes:,} classes, each left out in turn, they look like the '
                f"others (AUROC {self.auroc:.2f})"
            )
        rough = "roughly " if self.classes < FIRM_CLASSES else ""
        return (
            f'search says "nothing like this" by the {self.rule}: right for {rough}'
            f"{self.rejected:.0%} of the items whose class is not there, wrong for "
            f"{self.false_rejections:.0%} of the others (AUROC {self.auroc:.2f}; {self.classes:,} "
            "classes, each left out in turn)"
        )

    def judge(self, novelty: float) -> tuple[Confidence, str]:
        """Return the answer for a query, as a word and as a sentence."""
        nearer = float(np.interp(novelty, self.unknown, _LEVELS))
        if not self.useful:
            return "unknown", (
                "It is unknown whether its class is here: pictures of other classes look just as "
                "near."
            )
        if novelty > self.threshold:
            return "nothing", (
                f"Nothing like this here: only {FALSE_REJECTIONS:.0%} of the pictures whose class "
                f"is here look this different, but {1 - nearer:.0%} of the others do."
            )
        fraction = f"{nearer:.0%} of the pictures of other classes come as close"
        if nearer <= FALSE_REJECTIONS:
            return "here", f"Its class is most likely here: {fraction}."
        return "perhaps", f"Its class may be here, but {fraction}."

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Any) -> Self:
        """Read what `as_dict` gave; KeyError, TypeError or ValueError for anything else."""
        made = cls(**stored)
        numbers = [made.auroc, made.rejected, made.false_rejections, made.distance]
        valid = {
            "rule": made.rule in RULES,
            "useful": type(made.useful) is bool,
            "number": all(type(v) in (int, float) and 0 <= v <= 2.001 for v in numbers),
            "count": all(type(v) is int and v >= 0 for v in (made.items, made.classes)),
            "quantile": all(_are_quantiles(q) for q in (made.known, made.unknown)),
        }
        if wrong := [name for name, is_valid in valid.items() if not is_valid]:
            raise ValueError(f"open_set has an invalid {', '.join(wrong)}")
        return made


def _are_quantiles(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == len(_LEVELS)
        and all(type(v) in (int, float) and abs(v) <= 4 for v in values)
        and all(a <= b for a, b in pairwise(values))
    )


@dataclass(frozen=True)
class _Sample:
    """Novelty by each rule of items searched with their class in the index, and without it."""

    known: Mapping[str, Tensor]
    unknown: Mapping[str, Tensor]
    nearest: Tensor  # cosine of the nearest item
    labels: Tensor


def choose_open_set(embeddings: Sequence[Array], labels: Sequence[Array]) -> OpenSet | None:
    """Return the rule that rejects most items of held-out classes; None where they are too few.

    The items of a fold were embedded by one model, and are compared only with each other.
    """
    samples = [
        made
        for x, y in zip(embeddings, labels, strict=True)
        if (made := _measure(x, torch.as_tensor(y), tuple(RULES), most=SAMPLE_OF_FOLD)) is not None
        and len(torch.unique(made.labels)) >= ENOUGH_IN_FOLD
    ]
    if not _suffice(samples):
        return None

    def rejected(rule: str) -> float:
        """Each fold by a threshold of its own, as each index has its own."""
        return sum(_pooled([sample], rule).rejected * len(sample.labels) for sample in samples)

    return _pooled(samples, max(RULES, key=rejected))


def calibrate(
    vectors: Array, labels: Array, chosen: OpenSet, *, seen: Array | None = None
) -> OpenSet | None:
    """Return what a rule's values mean among these items; None where they are too few.

    labels: codes, below 0 for items without a class. seen: which items are of classes that the
    model learned from. Those lie closer together than new pictures of their classes will, so
    they are left out where others suffice; else the threshold is at least that of held-out classes.
    """
    y = torch.as_tensor(labels)

    def among(some: Tensor | None, at_least: Sequence[float] | None = None) -> OpenSet | None:
        sample = _measure(vectors, y, (chosen.rule,), among=some)
        if sample is None or not _suffice([sample]):
            return None
        return _pooled([sample], chosen.rule, at_least=at_least)

    learned = torch.zeros(len(y), dtype=torch.bool) if seen is None else torch.as_tensor(seen)
    found = among(~learned)
    if found is not None or not learned.any():
        return found
    return among(None, at_least=chosen.known)


def _measure(
    vectors: Array,
    labels: Tensor,
    rules: Sequence[str],
    *,
    among: Tensor | None = None,
    most: int = SAMPLE,
) -> _Sample | None:
    """Search a sample of the items twice: without their own class, and without another one."""
    x = normalize(as_tensor(vectors).detach().float())
    has_class = labels >= 0
    codes = torch.full_like(labels, -1)
    _, codes[has_class], sizes = torch.unique(
        labels[has_class], return_inverse=True, return_counts=True
    )
    suits = has_class.clone()
    suits[has_class] = sizes[codes[has_class]] > 1
    rows = (suits if among is None else suits & among).nonzero()[:, 0]
    if not len(rows):
        return None
    if len(rows) > most:
        rows = rows[torch.linspace(0, len(rows) - 1, most).round().long()]
    own, another = codes[rows], (codes[rows] + len(sizes) // 2) % len(sizes)

    def novelty(left_out: Tensor) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {rule: [] for rule in rules}
        for around in leave_one_out(x, rows, codes, left_out):
            of_items = codes[around.rows.clamp_min(0)]
            for rule in rules:
                found[rule].append(RULES[rule](around, of_items))
        return {rule: torch.cat(values) for rule, values in found.items()}

    nearest = torch.cat([around.near[:, 0] for around in leave_one_out(x, rows, size=1)])
    return _Sample(novelty(another), novelty(own), nearest, own)


def _suffice(samples: Sequence[_Sample]) -> bool:
    classes = sum(len(torch.unique(sample.labels)) for sample in samples)
    items = sum(len(sample.labels) for sample in samples)
    return items >= ENOUGH_ITEMS and classes >= ENOUGH_CLASSES


def _pooled(
    samples: Sequence[_Sample], rule: str, *, at_least: Sequence[float] | None = None
) -> OpenSet:
    """Return the figures of a rule over several samples, each of other classes.

    at_least: lower limits of the quantiles of the known, and so of the threshold.
    """
    known = torch.cat([sample.known[rule] for sample in samples]).double()
    unknown = torch.cat([sample.unknown[rule] for sample in samples]).double()
    offsets = np.cumsum([0, *(int(sample.labels.max()) + 1 for sample in samples)])
    labels = torch.cat([s.labels + int(o) for s, o in zip(samples, offsets, strict=False)])
    nearest = torch.cat([sample.nearest for sample in samples])
    levels = torch.from_numpy(_LEVELS)
    quantiles = known.quantile(levels, interpolation="higher").tolist()
    if at_least is not None:
        quantiles = [max(a, b) for a, b in zip(quantiles, at_least, strict=True)]
    threshold = quantiles[round((1 - FALSE_REJECTIONS) * (len(_LEVELS) - 1))]
    rejected, wrongly = (unknown > threshold).double(), (known > threshold).double()
    cosine = float(nearest.quantile(FALSE_REJECTIONS, interpolation="lower"))
    return OpenSet(
        rule=rule,
        auroc=auroc(known, unknown),
        rejected=float(rejected.mean()),
        false_rejections=float(wrongly.mean()),
        useful=paired_difference(rejected, wrongly, labels).low > FALSE_REJECTIONS,
        distance=max(0.0, 2 - 2 * cosine) ** 0.5,
        known=quantiles,
        unknown=unknown.quantile(levels, interpolation="higher").tolist(),
        items=len(known),
        classes=len(torch.unique(labels)),
    )


def auroc(low: Tensor, high: Tensor) -> float:
    """Return the chance that a value of `high` exceeds one of `low`; ties count half."""
    _, group, counts = torch.unique(torch.cat([low, high]), return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[group][len(low) :]
    return float((rank.sum() - len(high) * (len(high) + 1) / 2) / (len(low) * len(high)))
