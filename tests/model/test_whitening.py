"""The head in closed form, against scikit-learn and loops that can be read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from torch import Tensor

from nofuss.geometry import normalize
from nofuss.model.whitening import (
    EXACT,
    Affine,
    ClassSums,
    Recipe,
    closed_form,
    emphasised,
    pca,
    project,
    signed_root,
    takes_roots,
    untrained_head,
    whitening,
)


def items(seed: int = 0, n: int = 90, width: int = 6, shift: float = 0.5) -> tuple[Tensor, Tensor]:
    """Nine classes of equal size, in directions that vary unequally."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 9
    centers = torch.randn(9, width, generator=g)
    mix = torch.randn(width, width, generator=g)
    return centers[labels] + torch.randn(n, width, generator=g) @ mix + shift, labels


def cosines(x: Tensor) -> Tensor:
    x = normalize(x.double())
    return x @ x.T


def head_of(x: Tensor, labels: Tensor, recipe: Recipe, dim: int, count: int = 512) -> Affine:
    """Return the head of a recipe on features of both signs."""
    projection = project(x, torch.arange(len(x)), count)
    assert not projection.root
    sums = ClassSums.of(projection(x), labels).double()
    return projection.then(closed_form(sums, recipe, dim), sums.mean)


# PCA


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
            pca(features, count)
        return
    found = pca(features, count)
    known = min(count, n - 1)  # beyond the rank any directions complete the basis
    oracle = PCA(known, svd_solver="full").fit(features.numpy())
    expected = torch.from_numpy(oracle.components_)
    torch.testing.assert_close(found.weight[:known], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.bias, -found.weight @ torch.from_numpy(oracle.mean_))
    eye = torch.eye(count, dtype=torch.float64)
    torch.testing.assert_close(found.weight @ found.weight.T, eye, rtol=0, atol=1e-9)


def test_untrained_heads() -> None:
    x, _ = items()
    assert torch.equal(untrained_head(x, 6)(x), x)
    expected = PCA(3, svd_solver="full").fit_transform(x.double().numpy())
    found = untrained_head(x, 3)(x).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-3)


def test_a_pca_may_leave_the_mean_where_it_is() -> None:
    x, _ = items()
    centred, left = (pca(x, 3, center=center)(x) for center in (True, False))
    torch.testing.assert_close(centred.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    shift = pca(x, 3, center=False)(x.mean(0)[None])
    torch.testing.assert_close(left - centred, shift.expand(90, 3), rtol=0, atol=1e-4)


# Affine maps


def test_maps_one_after_the_other_are_one_map() -> None:
    g = torch.Generator().manual_seed(0)
    first = Affine(torch.randn(4, 6, generator=g), torch.randn(4, generator=g))
    second = Affine(torch.randn(3, 4, generator=g), torch.randn(3, generator=g))
    x = torch.randn(5, 6, generator=g)
    torch.testing.assert_close(first.then(second)(x), second(first(x)))
    torch.testing.assert_close(first.times(2.5)(x), 2.5 * first(x))
    torch.testing.assert_close(first(x)[0], first.weight @ x[0] + first.bias)


# Sums over classes


def test_scatter_is_the_sum_over_items() -> None:
    x, labels = items()
    x = x[:80].double()  # classes of eight and nine items
    labels = labels[:80] * 3  # numbers with gaps
    found = ClassSums.of(x, labels)
    within = torch.zeros(6, 6, dtype=torch.float64)
    between = torch.zeros(6, 6, dtype=torch.float64)
    for item, label in zip(x, labels, strict=True):
        mean = x[labels == label].mean(0)
        within += torch.outer(item - mean, item - mean)
        between += torch.outer(mean - x.mean(0), mean - x.mean(0))
    torch.testing.assert_close(found.within, within)
    torch.testing.assert_close(found.deviations().T @ found.deviations(), between)
    torch.testing.assert_close(found.mean, x.mean(0))


def test_sums_of_disjoint_classes_add_up() -> None:
    x, labels = items(n=80)
    x, side = x.double(), labels < 4
    added = ClassSums.of(x[side], labels[side]) + ClassSums.of(x[~side], labels[~side])
    whole = ClassSums.of(x, labels)
    torch.testing.assert_close(added.within, whole.within)
    between = [each.deviations().T @ each.deviations() for each in (added, whole)]
    torch.testing.assert_close(*between)
    torch.testing.assert_close(added.mean, whole.mean)


# Whitening


def test_without_shrinkage_every_direction_varies_equally_within_classes() -> None:
    x, labels = items(n=900)
    z = head_of(x, labels, Recipe(root=False, shrinkage=1e-9), 6)(x)
    scatter = ClassSums.of(z.double(), labels).within
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(scatter / (scatter.trace() / 6), eye, rtol=0, atol=1e-3)


def test_full_shrinkage_leaves_the_cosines_of_the_centred_features() -> None:
    x, labels = items()
    z = head_of(x, labels, Recipe(root=False, shrinkage=1.0, emphasis=0.0), 6)(x)
    torch.testing.assert_close(cosines(z), cosines(x - x.mean(0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shrinkage", [0.003, 0.3, 0.9])
def test_whitening_inverts_the_shrunk_scatter(shrinkage: float) -> None:
    """Mᵀ·S·M = I, S written out as in the docstring of the module."""
    x, labels = items()
    sums = ClassSums.of(x.double(), labels)
    k, within = 6, sums.within
    s = (1 - shrinkage) * within + shrinkage * within.trace() / k * torch.eye(k).double()
    m = whitening(sums, shrinkage)
    found = m.T @ s @ m
    expected = found[0, 0] * torch.eye(k).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(found[0, 0]))


def test_noise_along_the_leading_directions_is_taken_out() -> None:
    """What the closed form is for: the PCA keeps the noise, whitening keeps the classes."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 20
    signal = torch.randn(20, 8, generator=g)[labels] + 0.3 * torch.randn(400, 8, generator=g)
    x = torch.cat([20 * torch.randn(400, 4, generator=g), signal], 1)
    z = normalize(head_of(x, labels, Recipe(root=False, shrinkage=0.001), 6)(x))
    flat = normalize(pca(x, 6)(x))

    def right(e: Tensor) -> float:
        s = (e @ e.T).fill_diagonal_(-2)
        return float((labels[s.argmax(1)] == labels).double().mean())

    assert right(z) > 0.9
    assert right(flat) < 0.3


def test_the_leading_directions_come_first() -> None:
    x, labels = items()
    recipe = Recipe(root=False, shrinkage=0.3)
    whole = head_of(x, labels, recipe, 6)(x)
    spread = whole.var(0)
    assert (spread[:-1] >= spread[1:]).all()
    torch.testing.assert_close(head_of(x, labels, recipe, 2)(x), whole[:, :2])


def test_any_turn_has_the_cosines_of_all_directions() -> None:
    x, labels = items()
    sums = ClassSums.of(x.double(), labels)
    recipe = Recipe(root=False, shrinkage=0.3, emphasis=1.0)
    z = x - sums.mean
    turned, unturned = (cosines(z @ closed_form(sums, recipe, dim)) for dim in (6, None))
    torch.testing.assert_close(turned, unturned, rtol=0, atol=1e-9)


# Emphasis


@pytest.mark.parametrize("emphasis", [0.5, 2.0])
def test_emphasis_is_what_ridge_proxies_would_add_as_coordinates(emphasis: float) -> None:
    """One ridge regression a class, by scikit-learn, its output appended to the features."""
    x, labels = items(n=85)  # classes of nine and ten items
    sums = ClassSums.of(x.double(), labels)
    m = whitening(sums, 0.3)
    z = (x - sums.mean) @ m
    strength = float((z.T @ z).trace()) / 6  # t = tr T / k
    proxies = []
    for c in range(9):
        own = (labels == c).double()
        target = (own - own.mean()) / own.sum().sqrt()
        ridge = Ridge(alpha=strength, fit_intercept=False).fit(z.numpy(), target.numpy())
        proxies.append(torch.from_numpy(ridge.coef_))
    p = torch.stack(proxies, 1)  # (k, C)
    p *= (9 * 8 / 100 / p.square().sum()).sqrt()  # tr P = (C − 1)·C / 100
    expected = torch.cat([z, emphasis**0.5 * z @ p], 1)
    found = (x - sums.mean) @ emphasised(sums, m, emphasis)
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=1e-8)
    torch.testing.assert_close(cosines(found), cosines(expected), rtol=0, atol=1e-9)
    assert not torch.allclose(cosines(found), cosines(z), atol=0.01)


def test_nothing_to_emphasise() -> None:
    x, labels = items()
    one = ClassSums.of(x.double(), torch.zeros_like(labels))
    equal = x - ClassSums.of(x, labels).means[labels]  # all classes have one mean
    same = ClassSums.of(equal.double(), labels)
    for sums, emphasis in ((one, 2.0), (same, 2.0), (ClassSums.of(x.double(), labels), 0.0)):
        m = whitening(sums, 0.3)
        assert torch.equal(emphasised(sums, m, emphasis), m)


# Few items, few directions


def test_classes_of_one_item_have_no_scatter_to_divide_by() -> None:
    x, _ = items()
    z = head_of(x, torch.arange(len(x)), Recipe(root=False, shrinkage=0.5), 6)(x)
    torch.testing.assert_close(cosines(z), cosines(x - x.mean(0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("emphasis", [0.0, 2.0])
def test_one_class(emphasis: float) -> None:
    x, labels = items()
    recipe = Recipe(root=False, shrinkage=0.3, emphasis=emphasis)
    z = head_of(x, torch.zeros_like(labels), recipe, 3)(x)
    assert z.shape == (90, 3)
    assert z.isfinite().all()
    assert z.std(0).min() > 0


def test_the_basis_is_completed_where_items_are_fewer_than_directions() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 60, generator=g)
    found = project(x, torch.arange(9), 20)
    basis = normalize(found.basis.T).T
    torch.testing.assert_close(basis.T @ basis, torch.eye(20), rtol=0, atol=1e-5)
    centred = x - x.mean(0)
    torch.testing.assert_close(centred @ basis @ basis.T, centred, rtol=0, atol=1e-4)
    assert torch.equal(found.basis, project(x, torch.arange(9), 20).basis), "the same every time"
    new = torch.randn(4, 60, generator=g)
    assert found(new)[:, 8:].norm(dim=1).min() > 0.1, "new items vary along all of them"
    z = head_of(x, torch.arange(9) % 3, Recipe(root=False), 20, count=20)(x)
    assert z.shape == (9, 20)


def test_projected_items_have_length_one_on_average() -> None:
    x, _ = items(width=40, n=200)
    z = project(x, torch.arange(200), 40)(x)
    assert float(z.norm(dim=1).mean()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(z.mean(0), torch.zeros(40), rtol=0, atol=1e-4)


@pytest.mark.parametrize("n", [30, 300])
def test_the_projection_spans_the_principal_directions(n: int) -> None:
    """With fewer items than features, and with more, against the PCA above."""
    x, _ = items(n=n, width=50)
    z = project(x, torch.arange(n), 8)(x).double()
    expected = pca(x.double(), 8)(x.double())
    expected = expected / (x - x.mean(0)).norm(dim=1).mean()
    torch.testing.assert_close(z @ z.T, expected @ expected.T, rtol=0, atol=1e-4)


def test_wide_features_have_the_directions_of_the_sample() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, EXACT + 1, generator=g)
    few = torch.arange(0, 40, 2)
    changed = x.clone()
    changed[1::2] += torch.randn(20, EXACT + 1, generator=g)
    changed[1::2] += (x - changed)[1::2].mean(0)  # the mean of all is that of all items
    found, again = (project(each, few, 8) for each in (x, changed))
    torch.testing.assert_close(found.mean, again.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.basis, again.basis, rtol=0, atol=1e-5)
    narrow = x[:, :-1]
    exact, other = (project(narrow, rows, 8) for rows in (few, few + 1))
    assert torch.equal(exact.basis, other.basis), "of features up to EXACT no sample is taken"


# Signs and roots


def test_the_largest_weight_of_every_direction_is_positive() -> None:
    x, labels = items()
    head = head_of(x, labels, Recipe(root=False, shrinkage=0.3), 6)
    largest = head.weight.gather(1, head.weight.abs().argmax(1, keepdim=True))
    assert (largest > 0).all()
    projection = project(x, torch.arange(len(x)))
    sums = ClassSums.of(projection(x), labels).double()
    matrix = closed_form(sums, Recipe(root=False, shrinkage=0.3), 6)
    flipped = projection.then(matrix * torch.tensor([1, -1, 1, -1, -1, 1]), sums.mean)
    torch.testing.assert_close(flipped(x), head(x), rtol=0, atol=1e-5)


def test_signed_root() -> None:
    x = torch.tensor([-4.0, 0.0, 9.0], requires_grad=True)
    root = signed_root(x)
    torch.testing.assert_close(root, torch.tensor([-2.0, 0.0, 3.0]), rtol=0, atol=1e-5)
    root.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_roots_are_taken_of_features_that_are_hardly_ever_negative() -> None:
    assert takes_roots(torch.tensor([[1.0, 0.0, 3.0, -0.3]]))
    assert not takes_roots(torch.tensor([[1.0, 0.0, 3.0, -0.5]]))
    x, _ = items()
    assert not project(x, torch.arange(90)).root
    found = project(x.abs(), torch.arange(90))
    assert found.root
    root = signed_root(x.abs())
    torch.testing.assert_close(found.mean, root.mean(0))
    length = (root - root.mean(0)).norm(dim=1).mean()
    torch.testing.assert_close(found(x.abs()), (root - root.mean(0)) / length, rtol=0, atol=1e-5)
