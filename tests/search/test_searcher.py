"""How an index is searched: re-ranked or by distance, with what is left out, in small indexes."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nofuss import Index
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoder
from nofuss.ranking.neighbours import SIZE, vicinity_of
from nofuss.ranking.rerank import Rerank, Weighting, rerank
from nofuss.search.searcher import OPEN_SET, Searcher, open_searcher
from tests.search.verdicts import open_set


def made(items: int, each: int = 6, seed: int = 0) -> tuple[Index, Tensor]:
    """An index of classes with `each` items, and queries."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) // each
    centers = torch.randn(int(labels.max()) + 1, 8, generator=generator)
    x = centers[labels] + 0.7 * torch.randn(items, 8, generator=generator)
    names = [f"{i}.jpg" for i in range(items)]
    index = Index.build(x, names=names, labels=[f"class {c}" for c in labels.tolist()])
    return index, normalize(centers + 0.7 * torch.randn(centers.shape, generator=generator))


def encoder(**extra: object) -> Encoder:
    embedder = build_embedder("identity", dim=8, channels=8, weights=None)
    return Encoder(embedder, extra=dict(extra))


def decision(*, on: bool = True) -> dict[str, object]:
    return Rerank(
        8,
        2.0,
        on=on,
        scores={"without": [0.5, 0.4], "with": [0.6, 0.5]},
        gains={"recall@1": [0.1, 0.0, 0.2], "map@r": [0.1, 0.0, 0.2]},
    ).as_dict()


def test_the_order_is_the_re_ranked_one_and_distances_are_to_the_items() -> None:
    index, queries = made(300)
    searcher = Searcher(index, Weighting(4, 1.0))
    for query in queries[:5]:
        found = searcher.search(query, 20)
        rows = index.search(query[None], SIZE)[1]
        scores = rerank(vicinity_of(query[None], index.vectors[rows], rows), Weighting(4, 1.0))[0]
        assert found.rows == rows[0][scores.argsort(descending=True)][:20].tolist()
        assert found.rows != rows[0, :20].tolist()
        expected = (index.vectors[found.rows] - query).norm(dim=1)
        assert found.distances == pytest.approx(expected.tolist(), abs=1e-4)
    assert [f.rows for f in searcher.search_all(queries[:5], 20)] == [
        searcher.search(query, 20).rows for query in queries[:5]
    ]


@pytest.mark.parametrize("k", [1, 10, SIZE, SIZE + 50, 1000])
@pytest.mark.parametrize("weighting", [None, Weighting(4, 1.0)])
def test_every_item_is_found_once(k: int, weighting: Weighting | None) -> None:
    index, queries = made(300)
    found = Searcher(index, weighting).search(queries[0], k)
    assert len(found.rows) == len(set(found.rows)) == min(k, 300)
    if weighting is None:
        assert found.rows == index.search(queries[:1], k)[1][0].tolist()


def test_an_item_that_is_left_out_influences_nothing() -> None:
    """The same order as in an index without it."""
    index, _ = made(60)
    query = index.vectors[7]
    found = Searcher(index, Weighting(4, 1.0), open_set()).search(query, 60, without=7)
    index.remove(["7.jpg"])
    alone = Searcher(index, Weighting(4, 1.0), open_set()).search(query, 60)
    assert [row - (row > 7) for row in found.rows] == alone.rows
    assert found.verdict == alone.verdict


def test_an_empty_index_has_no_answer() -> None:
    index = Index.build(torch.empty(0, 8), names=())
    found = Searcher(index, Weighting(4, 1.0), open_set()).search(torch.ones(8), 5)
    assert (found.rows, found.found) == ([], None)


@pytest.mark.parametrize(("each", "neighbours"), [(20, 8), (6, 5), (2, 1)])
def test_no_more_neighbours_than_relatives(each: int, neighbours: int) -> None:
    index, _ = made(60, each)
    searcher = open_searcher(index, encoder(rerank=decision()))
    assert searcher.weighting == Weighting(neighbours, 2.0)
    assert open_searcher(index, encoder(rerank=decision()), rerank="none").weighting is None
    assert open_searcher(index, encoder(rerank=decision(on=False))).weighting is None


def test_one_item_a_class_is_ranked_by_distance() -> None:
    index, queries = made(60, 1)
    searcher = open_searcher(index, encoder(rerank=decision()))
    assert searcher.weighting is None
    assert searcher.search(queries[0], 5).rows == index.search(queries[:1], 5)[1][0].tolist()


def test_an_index_that_was_not_calibrated_is_when_it_is_opened() -> None:
    index, _ = made(60)
    model = encoder(open_set=open_set().as_dict())
    found = open_searcher(index, model).open_set
    assert found is not None
    assert (found.rule, found.items, found.classes) == ("nearest item", 60, 10)
    index.extra[OPEN_SET] = open_set(items=7).as_dict()
    kept = open_searcher(index, model).open_set
    assert kept is not None
    assert kept.items == 7
    assert open_searcher(made(60)[0], encoder()).open_set is None


def test_items_without_a_label_are_searched_too() -> None:
    index = Index.build(np.eye(8, dtype=np.float32), names=[str(i) for i in range(8)])
    searcher = open_searcher(index, encoder(rerank=decision(), open_set=open_set().as_dict()))
    assert searcher.open_set is None
    assert searcher.search(torch.eye(8)[3], 1).rows == [3]
