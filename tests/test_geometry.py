import math

import pytest
import torch

from nofuss import ProxyNCA
from nofuss.geometry import (
    distances,
    exact_squared_distances,
    normalize,
    squared_distances,
    unit_squared_distances,
)


def test_directions_have_unit_length_and_zero_stays_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    unit = normalize(x)
    assert torch.equal(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    unit.sum().backward()
    assert x.grad.abs().max() < 2


def test_subnormal_rows_are_as_good_as_zero():
    x = torch.full((1, 4), 1e-40)
    assert normalize(x).abs().max() < 1e-30
    assert ProxyNCA(3, 4)(x, torch.tensor([0])).item() == pytest.approx(math.log(2), abs=1e-5)


def test_normalize_passes_gradcheck():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize, x)


def test_squared_distances_equal_a_slow_loop_and_are_never_negative():
    x, y = torch.randn(5, 3), torch.randn(4, 3)
    slow = torch.stack([torch.stack([((a - b) ** 2).sum() for b in y]) for a in x])
    torch.testing.assert_close(squared_distances(x, y), slow)
    assert (squared_distances(1e4 * x, 1e4 * x) >= 0).all()


def test_the_gradient_of_a_distance_is_finite_where_points_coincide():
    x = torch.ones(2, 3, requires_grad=True)
    distances(x, x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-11, 1e-5, 1.0, 1e15])
def test_directions_do_not_depend_on_the_length(size):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([x, x * size, torch.zeros(1, 7)])
    torch.testing.assert_close(normalize(mixed), torch.cat([normalize(x)] * 2 + [mixed[-1:]]))
    torch.testing.assert_close(torch.func.vmap(normalize)(mixed), normalize(mixed))


def test_a_norm_that_overflows_gives_nan_not_a_zero_direction():
    assert normalize(torch.full((1, 3), 1e30)).isnan().all()


def test_a_zero_vector_is_as_far_as_a_cosine_of_zero():
    x = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    expected = torch.tensor([[0.0, 2, 2, 4], [2, 2, 2, 2], [2, 2, 0, 2], [4, 2, 2, 0]])
    torch.testing.assert_close(unit_squared_distances(x, x), expected)


def test_distances_of_concentrated_points_keep_their_digits():
    """A mean far from zero would cost as many digits as |mean|² has more than |x − y|²."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(32, 64) / 8 + 1e-3 * torch.randn(32, 64, generator=generator) / 8
    exact = squared_distances(x.double(), x.double())
    off = ~torch.eye(32, dtype=torch.bool)
    error = ((squared_distances(x, x) - exact).abs() / exact)[off].max()
    assert error < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_has_no_direction_and_no_distance(bad):
    x = torch.ones(3, 2)
    x[1, 0] = bad
    assert normalize(x)[1].isnan().any()
    assert normalize(x)[[0, 2]].isfinite().all()
    assert distances(x, torch.zeros(1, 2))[1].isfinite().logical_not().all()
    x[1, 0] = math.nan
    assert distances(x, x)[1].isnan().all()


@pytest.mark.parametrize("function", [normalize, lambda x: distances(x, x)])
def test_second_derivatives_are_finite_at_zero_and_where_points_coincide(function):
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1], x[2] = 0, x[3]
    hessian = torch.autograd.functional.hessian(lambda x: function(x).exp().sum(), x)
    assert hessian.isfinite().all()
    assert hessian.any()


def test_exact_squared_distances_keep_the_digits_that_a_product_loses() -> None:
    """Two points 1e-6 apart, far from a third: |x|² + |y|² − 2 x·y has none of them left."""
    x = torch.tensor([[1e4, 0.0], [1e4, 1e-6], [-2e4, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0, 1e-12], [1e-12, 0]], dtype=torch.float64)
    torch.testing.assert_close(exact_squared_distances(x, x)[:2, :2], expected, rtol=1e-12, atol=0)
    assert (squared_distances(x, x)[:2, :2] - expected).abs().max() > 1e-13
