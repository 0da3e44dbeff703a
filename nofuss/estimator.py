"""`ProxyEmbedding`: the paper on vectors, as a scikit-learn transformer."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

from nofuss.config import TrainConfig
from nofuss.data.collection import Collection, compact_labels
from nofuss.evaluate.recall import recall_at_k
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder
from nofuss.presets import resolve
from nofuss.train.feed import CollectionFeed
from nofuss.train.loop import Silent, train
from nofuss.train.setup import (
    batch_of,
    build_criterion,
    build_training,
    items_per_class,
    start_from_data,
)


class ProxyEmbedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A linear embedding of vectors, learned with proxies, for classes not seen in training.

    `fit(X, y)` starts at the PCA of X with proxies at the class means and trains both;
    `transform(X)` gives unit vectors; `score(X, y)` is Recall@1, each item searched among the
    others. Meant for embeddings of other models (CLIP, DINO, text): a better metric in seconds.

    dim: size of the embedding; at most the number of features, and of items less one.
    loss: a name that `nofuss train --loss` takes.
    epochs, batch, head_rate, proxy_rate, scale: None takes the "vectors" preset's value.
    random_state: of the order of items.
    """

    def __init__(
        self,
        dim: int = 64,
        *,
        loss: str = "proxy-nca",
        epochs: int | None = None,
        batch: int | None = None,
        head_rate: float | None = None,
        proxy_rate: float | None = None,
        scale: float | None = None,
        random_state: Any = 0,
    ) -> None:
        self.dim = dim
        self.loss = loss
        self.epochs = epochs
        self.batch = batch
        self.head_rate = head_rate
        self.proxy_rate = proxy_rate
        self.scale = scale
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Learn the embedding of X (N, F) so that items with equal y come close."""
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        labels, self.classes_ = compact_labels(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y has {len(self.classes_)} class; a distance needs two or more")
        self._n_features_out = min(self.dim, X.shape[1], len(X) - 1)
        config = resolve(
            TrainConfig(
                dim=self._n_features_out,
                loss=self.loss,
                epochs=self.epochs,
                batch=self.batch,
                head_rate=self.head_rate,
                proxy_rate=self.proxy_rate,
                scale=self.scale,
                seed=int(check_random_state(self.random_state).randint(2**31)),
            ),
            kind="vectors",
            small=False,
        )
        data = Collection(
            name="X",
            layout="array",
            kind="vectors",
            array=X,
            labels=labels,
            class_names=tuple(map(str, self.classes_)),
        )
        embedder = build_embedder("identity", dim=config.dim, channels=X.shape[1])
        criterion = build_criterion(config, len(self.classes_))
        start_from_data(embedder.head, criterion, torch.from_numpy(X), torch.from_numpy(labels))
        config = replace(config, per_class=items_per_class(config))
        feed = CollectionFeed(
            data,
            None,
            batch_of(config, len(X), len(self.classes_)),
            per_class=int(config.per_class or 0),
            seed=config.seed,
        )
        train(build_training(config, embedder, criterion), feed, watch=Silent())
        self.components_: NDArray[np.float32] = embedder.head.weight.detach().numpy()
        self.intercept_: NDArray[np.float32] = embedder.head.bias.detach().numpy()
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Unit vectors (N, dim)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        raw = torch.from_numpy(X @ self.components_.T + self.intercept_)
        return np.asarray(normalize(raw).numpy())

    def score(self, X: Any, y: Any) -> float:
        """Recall@1 of X with itself, each item left out of its own search."""
        return recall_at_k(self.transform(X), np.asarray(y), ks=(1,))[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
