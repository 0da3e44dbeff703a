import numpy as np
import pytest
import torch

from nofuss.proxies.counting import count_proxy_triplets, count_triplets

FIGURE_2 = [0, 0, 0, 0, 1, 1, 1, 1]  # four circles, four stars


def test_figure_2() -> None:
    assert count_triplets(torch.tensor(FIGURE_2), ordered=False) == 48
    assert count_proxy_triplets(torch.tensor(FIGURE_2)) == 8


@pytest.mark.parametrize(("k", "each"), [(2, 4), (3, 5), (10, 7)])
def test_formula_of_the_text(k: int, each: int) -> None:
    n = k * each
    labels = np.repeat(np.arange(k), each)
    assert count_triplets(labels) == n**2 * (n - k) * (k - 1) // k**2


def test_slow_loop_on_unequal_classes() -> None:
    labels = [0, 0, 0, 1, 1, 2, 5, 5, 5, 5]
    n = range(len(labels))
    triplets = [
        (x, y, z) for x in n for y in n for z in n if x != y and labels[x] == labels[y] != labels[z]
    ]
    assert count_triplets(torch.tensor(labels)) == len(triplets)
    assert count_triplets(torch.tensor(labels), ordered=False) == sum(x < y for x, y, _ in triplets)
    over_proxies = [(x, p) for x in n for p in {*labels} if p != labels[x]]
    assert count_proxy_triplets(torch.tensor(labels)) == len(over_proxies)
    assert count_proxy_triplets(torch.tensor(labels), 3) == 9 * len(over_proxies)


def test_names_and_numbers_beyond_64_bits() -> None:
    assert count_triplets(list("aabb")) == 8
    assert count_proxy_triplets(list("aabb")) == 4
    many = 3_000_000
    assert count_triplets(np.repeat([0, 1], many)) == 2 * many * (many - 1) * many


def test_one_class_has_none() -> None:
    assert count_triplets(torch.zeros(5)) == 0
    assert count_proxy_triplets(torch.zeros(5)) == 0
