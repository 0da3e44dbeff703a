"""`search`: re-ranked or by distance, with what is left out, in small indexes."""

import pytest
import torch
from torch import Tensor

from nofuss import Index
from nofuss.config import to_json
from nofuss.errors import RunError
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoder
from nofuss.ranking.neighbours import SIZE, vicinity_of
from nofuss.ranking.rerank import NEIGHBOURS, Rerank, reordered
from nofuss.search.filter import Compare
from nofuss.search.search import Answer, Vote, averaged_by, search, search_all
from nofuss.search.verdict import Query, calibrated
from tests.search.verdicts import indexed, open_set


def made(items: int, each: int = 6, seed: int = 0) -> tuple[Index, Tensor]:
    """An index of classes with `each` items, and queries."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) // each
    centers = torch.randn(int(labels.max()) + 1, 8, generator=generator)
    x = centers[labels] + 0.7 * torch.randn(items, 8, generator=generator)
    index = indexed(normalize(x), normalize(x), [f"class {c}" for c in labels.tolist()])
    index.about = index.about._replace(relatives=each - 1)
    return index, normalize(centers + 0.7 * torch.randn(centers.shape, generator=generator))


def encoder(**extra: object) -> Encoder:
    embedder = build_embedder("identity", dim=8, channels=8, weights=None)
    return Encoder(embedder, extra=dict(extra))


def decision(*, on: bool = True) -> dict[str, object]:
    return to_json(Rerank([0.1, 0.0 + 0.05 * on, 0.2]))


RERANKED = encoder(rerank=decision())


def names_of(answer: Answer) -> list[str]:
    return [hit.name for hit in answer.hits]


def test_the_order_is_the_re_ranked_one_and_distances_are_to_the_items() -> None:
    index, queries = made(300)
    for query in queries[:5]:
        found = search(index, RERANKED, query, 20)
        [hits] = index.search(query[None], SIZE)
        rows = torch.tensor([[index.names.index(name) for name in hits.names]])
        places = reordered(vicinity_of(query[None], index.vectors[rows], rows), 5)[0]
        order = rows[0][places][:20].tolist()
        assert names_of(found) == [index.names[row] for row in order]
        assert names_of(found) != hits.names[:20]
        expected = (index.vectors[order] - query).norm(dim=1).tolist()
        assert [hit.distance for hit in found.hits] == pytest.approx(expected, abs=1e-4)
        assert names_of(search(index, RERANKED, query, 20, rerank=False)) == hits.names[:20]
        torch.testing.assert_close(found.vector, query)
        assert found.milliseconds > 0
    together = search_all(index, RERANKED, [Query(query) for query in queries[:5]], 20)
    assert [names_of(answer) for answer in together] == [
        names_of(search(index, RERANKED, query, 20)) for query in queries[:5]
    ]


@pytest.mark.parametrize("k", [1, 10, SIZE, SIZE + 50, 1000])
@pytest.mark.parametrize("reranked", [True, False])
def test_every_item_is_found_once(k: int, reranked: bool) -> None:
    index, queries = made(300)
    found = names_of(search(index, RERANKED, queries[0], k, rerank=reranked))
    assert len(found) == len(set(found)) == min(k, 300)
    if not reranked:
        assert found == index.search(queries[:1], k)[0].names


def test_an_item_that_is_left_out_influences_nothing() -> None:
    """The same order and sentence as in an index without it."""
    index, _ = made(60)
    index.about = index.about._replace(open_set=open_set())
    query = index.vectors[7]
    found = search(index, RERANKED, query, 60, without="7.jpg")
    index.delete(["7.jpg"])
    alone = search(index, RERANKED, query, 60)
    assert names_of(found) == names_of(alone)
    assert (found.match, found.sentence, found.likely) == (
        alone.match,
        alone.sentence,
        alone.likely,
    )


def test_an_empty_index_has_no_answer() -> None:
    index = Index.build(torch.empty(0, 8), names=())
    for about in (calibrated(index, RERANKED), index.about._replace(open_set=open_set())):
        index.about = about
        found = search(index, RERANKED, torch.ones(8), 5)
        assert (found.hits, found.found, found.likely) == ((), None, None)


def test_most_of_the_neighbours_say_which_class_it_is() -> None:
    index, _ = made(60, 12)
    found = search(index, encoder(), index.vectors[0], 24)
    assert found.likely == Vote("class 0", found.likely.votes if found.likely else 0, 10)
    assert found.likely.votes > 5
    index.about = index.about._replace(open_set=open_set())
    far = search(index, encoder(), Query(index.vectors[0], far=0.6), 5)
    assert (far.match, far.likely) == ("nothing", None)
    assert [hit.name for hit in far.hits] == [hit.name for hit in found.hits[:5]]


def test_a_filter_leaves_distance_alone() -> None:
    index, queries = made(60)
    index.about = index.about._replace(open_set=open_set())
    where = Compare("label", "in", ("class 1", "class 2"))
    found = search(index, RERANKED, queries[0], 30, where=where)
    assert {hit.label for hit in found.hits} == {"class 1", "class 2"}
    distances = [hit.distance for hit in found.hits]
    assert len(distances) == 12
    assert distances == sorted(distances)
    assert (found.match, found.sentence) == ("unknown", "")


@pytest.mark.parametrize(("each", "neighbours"), [(20, NEIGHBOURS), (6, 5), (2, 1), (1, 0)])
def test_no_more_neighbours_than_relatives(each: int, neighbours: int) -> None:
    index, queries = made(60, each)
    about = calibrated(index, encoder())
    assert about.relatives == each - 1
    assert averaged_by(about, RERANKED) == neighbours
    assert (
        averaged_by(about, encoder()) == averaged_by(about, encoder(rerank=decision(on=False))) == 0
    )
    by_distance = index.search(queries[:1], 20)[0].names
    assert (names_of(search(index, RERANKED, queries[0], 20)) == by_distance) == (each == 1)


@pytest.mark.parametrize("stored", [1, {"neighbours": 8}, {"gains": {}}])
def test_a_foreign_decision_is_one_clear_line(stored: object) -> None:
    with pytest.raises(RunError, match=r"model.json holds rerank that nofuss did not write; rest"):
        averaged_by(made(6)[0].about, encoder(rerank=stored))
