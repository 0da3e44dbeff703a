import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks

from nofuss import ProxyEmbedding, recall_at_k
from nofuss.evaluate import per_query
from nofuss.model.whitening import untrained_head


@parametrize_with_checks([ProxyEmbedding(dim=2, epochs=2)])
def test_scikit_learn_agrees_that_it_is_an_estimator(estimator, check):
    check(estimator)


def noisy(classes=40, each=20, seed=0):
    """Classes in small directions, noise along large ones: the PCA sees the noise alone."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    noise = 30 * random.normal(size=(len(labels), 10))
    signal = random.normal(size=(classes, 30))[labels] + random.normal(size=(len(labels), 30)) / 3
    turn = np.linalg.qr(random.normal(size=(40, 40)))[0]
    return (np.concatenate([noise, signal], 1) @ turn).astype(np.float32), labels


@pytest.mark.slow
def test_small_noisy_vectors_need_no_settings():
    x, y = noisy(80)
    seen = y < 40
    found = ProxyEmbedding().fit(x[seen], y[seen])
    input_itself = recall_at_k(x[~seen], y[~seen], ks=(1,))[1]
    assert found.score(x[~seen], y[~seen]) > 0.95 > 0.5 > input_itself
    assert found.choice_.recipe.shrinkage < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, None])
def test_unseen_digits_are_found_no_worse_than_by_the_input_and_its_pca(dim):
    x, y = load_digits(return_X_y=True)
    seen = y < 6
    found = ProxyEmbedding(dim).fit(x[seen], y[seen]).transform(x[~seen])
    plain = untrained_head(torch.from_numpy(x[seen]).float(), dim or 64)
    beside = plain(torch.from_numpy(x[~seen]).float())
    ours, theirs = per_query(found, y[~seen]), per_query(beside, y[~seen])
    assert ours.recall1.mean() >= theirs.recall1.mean() - 0.01


@pytest.mark.slow
def test_epochs_ask_for_training():
    x, y = noisy()
    start = ProxyEmbedding(dim=8, epochs=0).fit(x, y)
    trained = ProxyEmbedding(dim=8, epochs=5).fit(x, y)
    assert start.choice_.kept == "closed form"
    assert trained.choice_.kept == "trained"
    assert not np.allclose(start.components_, trained.components_)


def test_what_makes_no_sense_is_refused():
    x, y = noisy(6)
    for options, name in (
        ({"head": "closed"}, "'closed'"),
        ({"head": "untrained", "loss": "proxy-nca"}, "loss"),
        ({"head": "closed-form", "epochs": 3}, "epochs"),
        ({"epochs": 0, "loss": "nope"}, "'nope'"),  # whether or not it would train
        ({"epochs": 0, "loss": "triplet", "scale": 3.0}, "scale"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            ProxyEmbedding(**options).fit(x, y)
        assert "--" not in str(caught.value)
    with pytest.raises(ValueError, match="two"):
        ProxyEmbedding().fit(np.eye(4), np.zeros(4, dtype=int))


@pytest.mark.slow
def test_embeddings_are_unit_vectors_and_repeat_with_the_seed():
    x, y = load_digits(return_X_y=True)
    first = ProxyEmbedding(dim=8, epochs=1, random_state=3).fit_transform(x, y)
    again = ProxyEmbedding(dim=8, epochs=1, random_state=3).fit_transform(x, y)
    assert np.array_equal(first, again)
    assert np.linalg.norm(first, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_torch_s_own_random_numbers_are_left_alone():
    x = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ProxyEmbedding(epochs=1).fit(x, np.arange(8).repeat(6))
    assert torch.equal(torch.rand(1), expected)
