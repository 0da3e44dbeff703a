"""What training tells a callback: where it is, and the numbers at that point.

`nofuss.train(…, callback=function)` calls the function with an `Event`

    start   once, with the settings, before the first step
    step    after each step of the optimizer: loss, rates
    epoch   after each epoch: the row of metrics.jsonl
    end     once, with the scores on unseen classes, when everything is written

Only training itself is reported, not the folds on which it is tried; where the folds decide against
training, there are no steps. Under torchrun the first process calls, the others do not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Event:
    """A point of training, as a callback receives it."""

    kind: Literal["start", "step", "epoch", "end"]
    run: Path
    """The run directory."""
    step: int
    """Steps of the optimizer so far; a resumed run continues to count."""
    epoch: int
    """Epochs finished so far."""
    values: Mapping[str, Any]
    """Settings by name at the start; afterwards numbers by name."""


Callback = Callable[[Event], None]


def flat_numbers(scores: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested scores under joined names: "baselines/PCA, 64-d/recall@1"."""
    found: dict[str, float] = {}
    for name, value in scores.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            found[f"{prefix}{name}"] = float(value)
    return found
