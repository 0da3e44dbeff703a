"""Scores of embeddings: Recall@K, MAP@R, R-precision, NMI and AMI over k-means, with intervals."""

from nofuss.evaluate.intervals import paired_difference
from nofuss.evaluate.kmeans import kmeans
from nofuss.evaluate.nmi import (
    adjusted_mutual_information,
    ami,
    nmi,
    normalized_mutual_information,
)
from nofuss.evaluate.precision import (
    map_at_r,
    mean_average_precision,
    precision_at_k,
    r_precision,
)
from nofuss.evaluate.protocol import PerQuery, Scores, evaluate, per_query
from nofuss.evaluate.recall import mean_reciprocal_rank, ranks_of_first_positive, recall_at_k
from nofuss.evaluate.triplet_accuracy import pair_accuracy, triplet_accuracy

__all__ = [
    "PerQuery",
    "Scores",
    "adjusted_mutual_information",
    "ami",
    "evaluate",
    "kmeans",
    "map_at_r",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "nmi",
    "normalized_mutual_information",
    "pair_accuracy",
    "paired_difference",
    "per_query",
    "precision_at_k",
    "r_precision",
    "ranks_of_first_positive",
    "recall_at_k",
    "triplet_accuracy",
]
