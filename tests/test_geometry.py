import math

import pytest
import torch

from nofuss import ProxyNCA
from nofuss.geometry import (
    are_ordinary,
    distances,
    exact_squared_distances,
    normalize,
    squared_distances,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-20, 1.0, 1e20, 1e37])
def test_directions_of_vectors_of_any_length(dtype, size):
    x = torch.randn(5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([x, x * size, torch.zeros(1, 7, dtype=dtype)])
    torch.testing.assert_close(normalize(mixed), torch.cat([normalize(x)] * 2 + [mixed[-1:]]))
    torch.testing.assert_close(torch.func.vmap(normalize)(mixed), normalize(mixed))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_has_no_direction_and_no_distance(bad):
    x = torch.ones(3, 2)
    x[1, 0] = bad
    assert normalize(x)[1].isnan().any()
    assert normalize(x)[[0, 2]].isfinite().all()
    assert distances(x, torch.zeros(1, 2))[1].isfinite().logical_not().all()
    x[1, 0] = math.nan
    assert distances(x, x).isnan().sum() == 5
    assert not are_ordinary(x)


@pytest.mark.parametrize("function", [normalize, lambda x: distances(x, x)])
def test_second_derivatives_are_finite_at_zero_and_where_points_coincide(function):
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1], x[2] = 0, x[3]
    hessian = torch.autograd.functional.hessian(lambda x: function(x).exp().sum(), x)
    assert hessian.isfinite().all()
    assert hessian.any()


def test_exact_squared_distances_keep_the_digits_that_a_product_loses() -> None:
    """Two points 1e-6 apart, far from the origin: |x|² + |y|² − 2 x·y has none of them left."""
    x = torch.tensor([[1e4, 0.0], [1e4, 1e-6]], dtype=torch.float64)
    expected = torch.tensor([[0, 1e-12], [1e-12, 0]], dtype=torch.float64)
    torch.testing.assert_close(exact_squared_distances(x, x), expected, rtol=1e-12, atol=0)
    assert (squared_distances(x, x) - expected).abs().max() > 1e-13
