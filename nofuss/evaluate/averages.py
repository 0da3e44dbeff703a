"""Means of the queries' scores: over queries, or over classes first."""

from typing import Literal

import torch
from torch import Tensor

from nofuss.evaluate.checked import classes_of
from nofuss.geometry import Array

Average = Literal["queries", "classes"]


def average_of(scores: Tensor, labels: Array | None, average: Average = "queries") -> float:
    """Return the mean of the queries' scores (N,), or the mean of their classes' means.

    NaN marks items that are no query. Over queries, large classes weigh more; over classes, all
    weigh the same.
    """
    if average == "queries":
        return float(scores.nanmean())
    if average != "classes":
        raise ValueError(f"unknown average {average!r}; choose from queries, classes")
    assert labels is not None
    return float(class_means(scores, classes_of(labels, len(scores))).nanmean())


def class_means(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the mean score of each class 0 … C − 1, NaN where none of its items is a query."""
    is_query = ~scores.isnan().cpu()
    of_queries = classes[is_query]
    count = int(classes.max()) + 1
    sums = torch.bincount(of_queries, scores.cpu()[is_query].double(), minlength=count)
    return sums / torch.bincount(of_queries, minlength=count)
