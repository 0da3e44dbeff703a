"""The head's start in closed form, against scikit-learn and definitions that can be read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from nofuss.geometry import normalize
from nofuss.model.start import (
    class_scatter,
    joined_scatter,
    pca_head,
    principal_components,
    signed_root,
    untrained_head,
    whitened,
    whitened_head,
)


def items(seed: int = 0, n: int = 90, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 9
    centers = torch.randn(9, width, generator=g)
    mix = torch.randn(width, width, generator=g)
    return centers[labels] + torch.randn(n, width, generator=g) @ mix + 4, labels


def cosines(x: torch.Tensor) -> torch.Tensor:
    x = normalize(x.double())
    return x @ x.T


@settings(deadline=None)
@given(
    n=st.integers(4, 40),
    width=st.integers(2, 12),
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_principal_components_are_scikit_learns(n: int, width: int, count: int, seed: int) -> None:
    features = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).double()
    if count > width:
        with pytest.raises(ValueError, match="lower dim"):
            principal_components(features, count)
        return
    mean, components = principal_components(features, count)
    known = min(count, n - 1)  # beyond the rank any directions complete the basis
    oracle = PCA(known, svd_solver="full").fit(features.numpy())
    torch.testing.assert_close(mean, torch.from_numpy(oracle.mean_))
    torch.testing.assert_close(
        components[:known], torch.from_numpy(oracle.components_), rtol=0, atol=1e-6
    )
    eye = torch.eye(count, dtype=torch.float64)
    torch.testing.assert_close(components @ components.T, eye, rtol=0, atol=1e-9)


def test_scatter_is_the_sum_over_items() -> None:
    x, labels = items()
    found = class_scatter(x, labels)
    within = torch.zeros(6, 6, dtype=torch.float64)
    total = torch.zeros(6, 6, dtype=torch.float64)
    for item, label in zip(x.double(), labels, strict=True):
        d = item - x.double()[labels == label].mean(0)
        within += torch.outer(d, d)
        d = item - x.double().mean(0)
        total += torch.outer(d, d)
    torch.testing.assert_close(found.within, within, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.total(), total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.mean, x.double().mean(0))


def test_scatters_of_disjoint_classes_add_up() -> None:
    x, labels = items()
    side = labels < 4
    parts = [class_scatter(x[rows], labels[rows]) for rows in (side, ~side)]
    whole = class_scatter(x, labels)
    torch.testing.assert_close(joined_scatter(parts).total(), whole.total(), rtol=1e-6, atol=1e-4)


def test_without_shrinkage_every_direction_varies_equally_within_classes() -> None:
    x, labels = items(n=900)
    z = whitened_head(class_scatter(x, labels), shrinkage=0.0)(x)
    scatter = class_scatter(z, labels).within
    scale = scatter.trace() / 6
    torch.testing.assert_close(
        scatter / scale, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("center", [True, False])
def test_full_shrinkage_leaves_the_features_as_they_are(center: bool) -> None:
    x, labels = items()
    z = whitened_head(class_scatter(x, labels), shrinkage=1.0, center=center)(x)
    expected = x - x.mean(0) if center else x
    torch.testing.assert_close(cosines(z), cosines(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shrinkage", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("dim", [None, 2])
def test_the_quick_form_has_the_angles_of_the_head(shrinkage: float, dim: int | None) -> None:
    x, labels = items()
    scatter = class_scatter(x, labels)
    head = whitened_head(scatter, shrinkage=shrinkage, dim=dim, center=False)
    quick = whitened(scatter, x, shrinkage=shrinkage, dim=dim)
    torch.testing.assert_close(cosines(quick), cosines(head(x)), rtol=0, atol=2e-3)


def test_noise_along_the_leading_directions_is_taken_out() -> None:
    """What the closed form is for: the PCA keeps the noise, whitening keeps the classes."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 20
    signal = torch.randn(20, 8, generator=g)[labels] + 0.3 * torch.randn(400, 8, generator=g)
    x = torch.cat([20 * torch.randn(400, 4, generator=g), signal], 1)
    z = normalize(whitened_head(class_scatter(x, labels), shrinkage=0.001, dim=6)(x))
    flat = normalize(pca_head(x, 6)(x))

    def right(e: torch.Tensor) -> float:
        s = (e @ e.T).fill_diagonal_(-2)
        return float((labels[s.argmax(1)] == labels).double().mean())

    assert right(z) > 0.9
    assert right(flat) < 0.3


def test_classes_of_one_item_have_no_scatter_to_divide_by() -> None:
    x, _ = items()
    z = whitened_head(class_scatter(x, torch.arange(len(x))), shrinkage=0.5)(x)
    torch.testing.assert_close(cosines(z), cosines(x - x.mean(0)), rtol=0, atol=1e-5)


def test_untrained_heads() -> None:
    x, _ = items()
    assert torch.equal(untrained_head(x, 6)(x), x)
    expected = PCA(3, svd_solver="full").fit_transform(x.double().numpy())
    found = untrained_head(x, 3)(x).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-3)


def test_more_dimensions_than_items() -> None:
    x, labels = items(n=9)  # one item a class, nine in all
    wide = torch.cat([x, torch.randn(9, 30, generator=torch.Generator().manual_seed(1))], 1)
    assert untrained_head(wide, 36).weight.shape == (36, 36)
    assert whitened_head(class_scatter(wide, labels), shrinkage=0.5, dim=20)(wide).shape == (9, 20)


def test_signed_root() -> None:
    x = torch.tensor([-4.0, 0.0, 9.0], requires_grad=True)
    torch.testing.assert_close(signed_root(x), torch.tensor([-2.0, 0.0, 3.0]), rtol=0, atol=1e-5)


def test_without_shrinkage_features_of_rank_one_have_a_head() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 1)) @ random.normal(size=(1, 400)) + 3
    scatter = class_scatter(torch.from_numpy(x).float(), torch.arange(300) % 20)
    assert whitened_head(scatter, shrinkage=0.0, dim=4).weight.isfinite().all()
