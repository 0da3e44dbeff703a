import torch

from nofuss.geometry import distances, normalize, squared_distances


def test_directions_have_unit_length_and_zero_stays_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    unit = normalize(x)
    assert torch.equal(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    unit.sum().backward()
    assert x.grad.abs().max() < 2


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
