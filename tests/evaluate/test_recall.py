"""Recall@K and the rank of the first positive, against a loop, by hand, and against peers."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor

from nofuss.evaluate import evaluate, ranks_of_first_positive, recall_at_k


def slow_ranks(x: Tensor, labels: Tensor, *, normalize: bool) -> list[int]:
    """The definition: sort the others by distance, wrong classes first among equals."""
    if normalize:
        x = x / x.norm(dim=1, keepdim=True)
    ranks = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        d = {j: float((x[i] - x[j]).square().sum()) for j in others}
        right = [d[j] for j in others if labels[j] == labels[i]]
        wrong = [d[j] for j in others if labels[j] != labels[i]]
        ranks.append(1 + sum(w <= min(right) for w in wrong) if right else 0)
    return ranks


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("items", "classes"), [(2, 1), (7, 3), (60, 25), (61, 1), (90, 4)])
@pytest.mark.parametrize("block", [5, 384])
def test_ranks_equal_the_slow_loop(scene, items, classes, normalize, block):
    x, labels = scene(items, classes)
    ranks = ranks_of_first_positive(x.double(), labels, normalize=normalize, block=block)
    assert ranks.tolist() == slow_ranks(x.double(), labels, normalize=normalize)


def test_by_hand():
    # On a line, 0 and 1 of class a, 2 and 10 of class b, 3 alone in class c.
    x = torch.tensor([[0.0], [1.0], [2.0], [10.0], [3.0]])
    labels = np.array(["a", "a", "b", "b", "c"])
    # 0: nearest is 1. 1: 0 and 2 tie, so the wrong one comes first. 2: all others before 10.
    # 10: 3 comes before 2. 3: no query, but in everyone's gallery.
    assert ranks_of_first_positive(x, labels, normalize=False).tolist() == [1, 2, 4, 2, 0]
    shares = recall_at_k(x, labels, (1, 2, 3, 4), normalize=False)
    assert shares == {1: 0.25, 2: 0.75, 3: 0.75, 4: 1.0}


@pytest.mark.parametrize("dim", [3, 64, 1000])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_duplicate_of_another_class_is_a_miss_at_any_block(dim, normalize):
    # Every vector four times, twice in each of two classes: one tie on either side of the positive.
    generator = torch.Generator().manual_seed(0)
    x = (5 + torch.randn(100, dim, generator=generator)).repeat(4, 1)
    labels = torch.cat([torch.arange(100).repeat(2), torch.arange(100, 200).repeat(2)])
    order = torch.randperm(400, generator=generator)
    for block in (5, 64, 384):
        ranks = ranks_of_first_positive(x[order], labels[order], normalize=normalize, block=block)
        assert ranks.tolist() == [3] * 400


def test_a_collapsed_network_scores_nothing(scene):
    _, labels = scene(40, 4)
    assert recall_at_k(torch.ones(40, 8), labels, (1, 8)) == {1: 0.0, 8: 0.0}
    assert recall_at_k(torch.zeros(40, 8), labels, (1, 8)) == {1: 0.0, 8: 0.0}


def test_equals_pytorch_metric_learning_and_faiss(scene):
    x, labels = scene(1500, 300, 16)
    x = x / x.norm(dim=1, keepdim=True)
    ks = (1, 2, 5, 100)
    ours = recall_at_k(x, labels, ks)
    peer = AccuracyCalculator(include=("precision_at_1",), device=torch.device("cpu"))
    assert ours[1] == pytest.approx(peer.get_accuracy(x, labels)["precision_at_1"], abs=1e-12)
    index = faiss.IndexFlatL2(16)
    index.add(x.numpy())
    neighbours = index.search(x.numpy(), 101)[1]
    others = np.stack([row[row != i][:100] for i, row in enumerate(neighbours)])
    hit = labels.numpy()[others] == labels.numpy()[:, None]
    queries = torch.bincount(labels)[labels].numpy() > 1
    for k in ks:
        assert ours[k] == pytest.approx(hit[queries, :k].any(1).mean(), abs=1e-12)


@pytest.mark.parametrize("block", [7, 384])
def test_a_gallery_apart_equals_the_slow_loop(scene, block):
    x, labels = scene(90, 12)
    queries, gallery = slice(0, 40), slice(40, 90)
    d = torch.cdist(x[queries].double(), x[gallery].double())
    same = labels[queries, None] == labels[gallery]
    expected = []
    for row, right in zip(d, same, strict=True):
        best = row[right].min() if right.any() else -1
        expected.append(1 + int((row[~right] <= best).sum()) if right.any() else 0)
    ranks = ranks_of_first_positive(
        x[queries],
        labels[queries],
        gallery=x[gallery],
        gallery_labels=labels[gallery],
        normalize=False,
        block=block,
    )
    assert ranks.tolist() == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(3, 60), st.integers(1, 12))
def test_properties(seed, items, classes):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % min(classes, items // 2)
    x = torch.randn(items, 5, generator=generator)
    shares = recall_at_k(x, labels, (1, 2, 4, items))
    assert list(shares.values()) == sorted(shares.values())  # never falls with K
    assert shares[items] == 1.0
    order = torch.randperm(items, generator=generator)
    assert recall_at_k(x[order], labels[order], (1, 2, 4, items)) == shares
    assert recall_at_k(3 * x, -7 * labels, (1, 2, 4, items)) == shares  # scale and names are free
    own_gallery = recall_at_k(x, labels, (1,), gallery=x, gallery_labels=labels)
    assert own_gallery == {1: 1.0}  # the query itself is then found


def test_arrays_tensors_and_precisions_agree(scene):
    x, labels = scene(200, 30)
    x = x.half()
    expected = recall_at_k(x, labels)
    assert recall_at_k(x.numpy(), labels.numpy()) == expected
    assert recall_at_k(x.double().requires_grad_(), labels.int()) == expected


def test_a_zero_vector_is_at_distance_one_of_all_others():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    # From (1, 0) its class is at distance √2, behind the zero vector.
    assert ranks_of_first_positive(x, torch.tensor([0, 0, 1])).tolist() == [2, 2, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: recall_at_k(x[:0], y[:0]), "nothing to score"),
        (lambda x, y: recall_at_k(x[0], y), "shape"),
        (lambda x, y: recall_at_k(x, y[:-1]), "one an embedding"),
        (lambda x, y: recall_at_k(x / 0, y), "NaN or infinity"),
        (lambda x, y: recall_at_k(x, torch.arange(len(x))), "no class has two items"),
        (lambda x, y: recall_at_k(x, y, ()), "ks"),
        (lambda x, y: recall_at_k(x, y, (0, 1)), "ks"),
        (lambda x, y: recall_at_k(x, y, gallery=x), "belong together"),
        (lambda x, y: recall_at_k(x, y, gallery=x[:, :2], gallery_labels=y), "dimensions"),
        (lambda x, y: recall_at_k(x, y, gallery=x, gallery_labels=y + 99), "share no class"),
        (lambda x, y: recall_at_k(x.double() * 1e200, y), "rescale"),
        (lambda x, y: recall_at_k(x, y, (1.5,)), "ks"),
        (lambda x, y: recall_at_k(x, y, query_rows=y), "give gallery"),
        (lambda x, y: recall_at_k(x, y, average="class"), "choose from queries, classes"),
        (lambda x, y: recall_at_k(x, y / 0.0), "NaN or infinity"),
    ],
)
def test_misuse_is_one_line(scene, call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(*scene(20, 4))
    assert "\n" not in str(error.value)


def test_signed_and_unsigned_labels_are_compared_as_whole_numbers() -> None:
    """Numpy would merge both to floats, in which neighbouring large numbers are equal."""
    x = np.random.default_rng(0).normal(size=(60, 4))
    labels = np.arange(60) // 3 + 2**53
    rows = np.arange(60)
    expected = recall_at_k(x, labels)
    for gallery_labels in (labels, labels.astype(np.uint64)):
        options = {"gallery": x, "gallery_labels": gallery_labels, "query_rows": rows}
        assert recall_at_k(x, labels, **options) == expected


def test_reversed_rows_are_rows() -> None:
    x, labels = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) // 3
    options = {"gallery": x[::-1], "gallery_labels": labels[::-1]}
    found = recall_at_k(x, labels, query_rows=np.arange(60)[::-1], **options)
    assert found == recall_at_k(x, labels)


@pytest.mark.parametrize("normalize", [True, False])
def test_thousands_of_queries_whose_classes_the_gallery_lacks(normalize: bool) -> None:
    """More than are laid out at once, so that a whole part has no positive."""
    random = np.random.default_rng(0)
    x, labels = random.normal(size=(9000, 3)), np.arange(9000) // 100
    gallery, gallery_labels = random.normal(size=(300, 3)), 3 + np.arange(300) % 4
    options = {"gallery": gallery, "gallery_labels": gallery_labels, "normalize": normalize}
    found = evaluate(x, labels, **options)
    alone = evaluate(x[300:700], labels[300:700], **options)
    assert (found.queries, found.classes) == (400, 4)
    assert (found.recall, found.map_at_r) == (alone.recall, alone.map_at_r)
    assert found.intervals == alone.intervals
