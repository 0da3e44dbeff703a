"""`ProxyEmbedding`: the paper on vectors, as a scikit-learn transformer."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

from nofuss.config import Options, Settings
from nofuss.data.collection import compact_labels
from nofuss.data.open import TrainingData
from nofuss.data.readers.arrays import check_vectors, from_arrays
from nofuss.errors import NofussError, in_python
from nofuss.evaluate.recall import recall_at_k
from nofuss.geometry import as_tensor, normalize
from nofuss.model.backbones import build_backbone
from nofuss.model.whitening import Affine, signed_root
from nofuss.training.criterion import check_loss
from nofuss.training.head import fit_head
from nofuss.training.settings import head_dim, resolve


class ProxyEmbedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A linear embedding of vectors, learned with proxies, for classes not seen in training.

    `fit(X, y)` whitens X within classes and emphasises the span of ridge-regression proxies, by a
    recipe that finds classes best that were held out in turn, or keeps X as it is where that is
    significantly better (`choice_` says which and why); `transform(X)` gives unit vectors;
    `score(X, y)` is Recall@1, each item searched among the others. Meant for embeddings of other
    models (CLIP, DINO, text): a better metric in seconds.

    dim: size of the embedding. None takes at most 512, or fewer where the folds prefer that; the
        features are kept in all their dimensions where they are better as they are.
    head: "auto" as above; "untrained", "closed-form", or "trained": the closed form, trained on
        with proxies at the class means. A loss, epochs, batch_size, head_lr, proxy_lr or scale that
        is not None asks for training too; None follows from the data as in `nofuss train`.
    loss: a name that `nofuss train --loss` takes; None is "proxy-nca".
    epochs: passes over X; 0 keeps the closed form.
    random_state: seed of the order of items.
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        head: str = "auto",
        loss: str | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        head_lr: float | None = None,
        proxy_lr: float | None = None,
        scale: float | None = None,
        random_state: Any = 0,
    ) -> None:
        self.dim = dim
        self.head = head
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.head_lr = head_lr
        self.proxy_lr = proxy_lr
        self.scale = scale
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Learn the embedding of X (N, F) so that items with equal y come close."""
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        labels, self.classes_ = compact_labels(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y has {len(self.classes_)} class; a distance needs two or more")
        settings = self._checked(X, labels)
        fit = fit_head(as_tensor(X), torch.from_numpy(labels), settings, compare=False)
        self.choice_ = fit.choice
        self.components_: NDArray[np.float32] = fit.head.weight.numpy()
        self.intercept_: NDArray[np.float32] = fit.head.bias.numpy()
        self._n_features_out = len(self.components_)
        return self

    def _checked(self, X: NDArray[np.float32], labels: NDArray[np.int64]) -> Settings:
        """Return the settings; raise ValueError if they or the values of X can't be used."""
        asked = Options(
            dim=self.dim,
            head=None if self.head == "auto" else self.head,  # type: ignore[arg-type]
            loss=self.loss,
            epochs=self.epochs,
            batch_size=self.batch_size,
            head_lr=self.head_lr,
            proxy_lr=self.proxy_lr,
            scale=self.scale,
            seed=int(check_random_state(self.random_state).randint(2**31)),
        )
        try:
            check_vectors(X, name="X")
            data = TrainingData(
                from_arrays({"vectors": X, "labels": labels}, name="X"), None, None, ""
            )
            width = X.shape[1]
            settings = resolve(asked, data, build_backbone("identity", channels=width))
            check_loss(settings, int(labels.max()) + 1, head_dim(settings, width))
        except NofussError as error:
            raise ValueError(in_python(str(error))) from None
        return settings

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Unit vectors (N, dim)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        x = as_tensor(X)
        x = signed_root(x) if self.choice_.recipe.root else x
        head = Affine(torch.from_numpy(self.components_), torch.from_numpy(self.intercept_))
        return np.asarray(normalize(head(x)).numpy())

    def score(self, X: Any, y: Any) -> float:
        """Recall@1 of X with itself, each item left out of its own search."""
        return recall_at_k(self.transform(X), np.asarray(y), ks=(1,))[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
