import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks

from nofuss import ProxyEmbedding


@parametrize_with_checks([ProxyEmbedding(dim=2, epochs=2)])
def test_scikit_learn_agrees_that_it_is_an_estimator(estimator, check):
    check(estimator)


def test_a_trained_metric_beats_its_start_on_unseen_classes():
    x, y = load_digits(return_X_y=True)
    seen = y < 6
    start = ProxyEmbedding(dim=8, epochs=0).fit(x[seen], y[seen])
    trained = ProxyEmbedding(dim=8, epochs=10).fit(x[seen], y[seen])
    assert trained.score(x[~seen], y[~seen]) > start.score(x[~seen], y[~seen])


def test_embeddings_are_unit_vectors_and_repeat_with_the_seed():
    x, y = load_digits(return_X_y=True)
    first = ProxyEmbedding(dim=8, epochs=1, random_state=3).fit_transform(x, y)
    again = ProxyEmbedding(dim=8, epochs=1, random_state=3).fit_transform(x, y)
    assert np.array_equal(first, again)
    assert np.linalg.norm(first, axis=1) == pytest.approx(1, abs=1e-5)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="needs two or more"):
        ProxyEmbedding().fit(np.eye(4), np.zeros(4, dtype=int))
