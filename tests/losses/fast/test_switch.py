"""`fused=`: one switch, the same results; refused where there is none."""

import pytest
import torch

from nofuss import ProxyAnchor, ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, SoftTriple

FUSIBLE = (ProxyNCA, ProxyNCAPlusPlus, ProxyTriplet, ProxyAnchor)


def step(criterion, x, labels):
    """In double, where rounding can't hide or fake a difference."""
    criterion, x = criterion.double(), x.double().requires_grad_()
    loss = criterion(x, labels)
    loss.backward()
    return loss.detach(), x.grad, criterion.proxies.grad


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_fused_form_gives_the_plain_ones_values_and_gradients(loss, ratio):
    x, labels = torch.randn(7, 5), torch.randint(50, (7,))
    fused, plain = (
        step(loss(50, 5, seed=1, proxies_per_class=ratio, fused=f), x, labels)
        for f in (True, False)
    )
    for got, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", FUSIBLE)
@pytest.mark.parametrize("classes", [2, 3, 3000])
def test_few_and_many_classes_equal_labels_duplicates_and_a_zero_row(loss, classes):
    x, labels = torch.randn(6, 70), torch.tensor([1, 1, 0, 0, 1, 1])
    x[1] = x[0]
    x[2] = 0
    fused, plain = (step(loss(classes, 70, seed=1, fused=f), x, labels) for f in (True, False))
    for got, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [ProxyNCA, ProxyNCAPlusPlus])
def test_the_form_for_few_proxies_passes_gradcheck(loss):
    criterion = loss(6, 4, seed=0).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 5, 5, 2])
    assert criterion.fused is None
    assert torch.autograd.gradcheck(
        lambda x, *_: criterion(x, labels), (x, *criterion.parameters())
    )


def test_by_itself_proxy_triplet_is_fused_for_many_proxies_only():
    x, labels = torch.randn(32, 8), torch.zeros(32, dtype=torch.int64)
    names = [
        str(ProxyTriplet(classes, 8)(x.requires_grad_(), labels).grad_fn)
        for classes in (100, 50_000)
    ]
    assert "Fused" not in names[0]
    assert "Fused" in names[1]


def test_where_there_is_no_fused_form_asking_for_it_is_an_error():
    for make in (
        lambda: ProxyNCA(10, 4, scale=None, fused=True),
        lambda: ProxyNCA(10, 4, assignment="dynamic", fused=True),
        lambda: ProxyNCA(10, 4, proxies_per_class=2, fused=True),
    ):
        with pytest.raises(ValueError, match="no fused form"):
            make()
    assert SoftTriple(10, 4).fused is False
