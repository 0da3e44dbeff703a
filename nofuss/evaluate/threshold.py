"""The distance beyond which search answers "nothing like this", calibrated on held-out classes.

A picture whose class is in the index has its nearest relative (item of its class) at some distance;
one whose class is not has its nearest stranger (item of another class) at another. Both are
measured on *training* classes that the model did not learn from, each item against all others. The
threshold is the distance within which 95% of the nearest relatives lie: a wrong "nothing" is the
mistake that hurts, so its rate is fixed; the share of strangers that are then recognised is
measured and kept with it. Where classes resemble each other (birds) that share is small, and
smaller in a large index: more strangers, so nearer ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nofuss.geometry import Array, as_tensor, normalize

FOUND = 0.95
ENOUGH_ITEMS, ENOUGH_CLASSES = 20, 5
"""The 95% point of fewer items or classes says nothing about other classes."""


@dataclass(frozen=True)
class Threshold:
    """The distance beyond which neighbours are not alike, with its two error rates."""

    distance: float
    denied: float
    """Share of items whose class is in the index but whose nearest relative is farther."""
    accepted: float
    """Share of items with a neighbour within it although their class is not in the index."""
    items: int
    classes: int

    def as_extra(self) -> dict[str, Any]:
        """Return what model.json stores."""
        return {
            "threshold": self.distance,
            "threshold_errors": {"denied": self.denied, "accepted": self.accepted},
            "threshold_from": {
                "items": self.items,
                "classes": self.classes,
                "rule": f"{FOUND:.0%} of held-out training items have a relative within it",
            },
        }

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "Threshold":
        """Read what `as_extra` gave; raises KeyError or TypeError for anything else."""
        errors, source = extra["threshold_errors"], extra["threshold_from"]
        return cls(
            distance=float(extra["threshold"]),
            denied=float(errors["denied"]),
            accepted=float(errors["accepted"]),
            items=int(source["items"]),
            classes=int(source["classes"]),
        )

    def describe(self) -> str:
        """Return one line for the user."""
        return (
            f'search says "nothing like this" beyond distance {self.distance:.3f}; on '
            f"{self.classes:,} held-out training classes that is wrong for {self.denied:.0%} of "
            f"the items whose class is there, and right for {1 - self.accepted:.0%} of the others"
        )


def calibrate(embeddings: Sequence[Array], labels: Sequence[Array]) -> Threshold | None:
    """Return the threshold from held-out items of each fold; None where they are too few.

    The items of a fold were embedded by one model, and are compared only with each other.
    """
    ys = [torch.as_tensor(y) for y in labels]
    pairs = [
        nearest_by_class(normalize(as_tensor(x).detach().float()), y)
        for x, y in zip(embeddings, ys, strict=True)
    ]
    relative = torch.cat([relative for relative, _ in pairs])
    stranger = torch.cat([stranger for _, stranger in pairs])
    known = relative.isfinite() & stranger.isfinite()
    classes = len(torch.unique(torch.cat(ys)[known]))
    if int(known.sum()) < ENOUGH_ITEMS or classes < ENOUGH_CLASSES:
        return None
    relative, stranger = relative[known], stranger[known]
    distance = float(relative.quantile(FOUND, interpolation="higher"))
    return Threshold(
        distance=distance,
        denied=float((relative > distance).double().mean()),
        accepted=float((stranger <= distance).double().mean()),
        items=len(relative),
        classes=classes,
    )


@torch.no_grad()
def nearest_by_class(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each unit vector's distance to the nearest of its class and of another, (N,) each.

    An item is not its own neighbour; inf where there is none.
    """
    same, other = torch.full((len(x),), -torch.inf), torch.full((len(x),), -torch.inf)
    for start in range(0, len(x), 1024):
        rows = torch.arange(start, min(start + 1024, len(x)))
        s = x[rows] @ x.T
        related = labels[rows, None] == labels[None]
        other[rows] = s.masked_fill(related, -torch.inf).amax(1)
        s[torch.arange(len(rows)), rows] = -torch.inf
        same[rows] = s.masked_fill(~related, -torch.inf).amax(1)
    return _distance(same), _distance(other)


def _distance(cosine: Tensor) -> Tensor:
    return (2 - 2 * cosine).clamp_min(0).sqrt()
