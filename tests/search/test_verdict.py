"""What an index says of a query: calibrated on a sample, right when items come, go, change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nofuss.errors import RunError
from nofuss.geometry import normalize
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoded, Encoder
from nofuss.ranking.open_set import class_sums, far, near, quantiles
from nofuss.search import Index, verdict
from nofuss.search.index import Item, draw
from nofuss.search.search import search
from nofuss.search.verdict import Query, calibrated, judged, queries_of, with_features
from tests.search.verdicts import indexed, open_set


def items(classes: int, each: int, *, seed: int = 0) -> tuple[Tensor, Tensor, list[str | None]]:
    """Return vectors, features and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    x = torch.randn(classes, 16, generator=generator)[labels]
    x = x + 0.4 * torch.randn(len(labels), 16, generator=generator)
    features = torch.cat([x.abs() + 1, x], 1)
    return normalize(x), normalize(features), [f"class {seed} {c}" for c in labels.tolist()]


def encoder(*seen: str, **extra: object) -> Encoder:
    embedder = build_embedder("identity", dim=16, channels=16, weights=None)
    return Encoder(embedder, class_names=seen, extra=dict(extra))


def committed(index: Index, *seen: str, **extra: object) -> Index:
    index.commit(calibrated(index, encoder(*seen, **extra)))
    return index


def words(index: Index, *given: Tensor) -> list[str]:
    return [each.match for each in judged(index, queries_of(index, Encoded(*given)))]


def test_known_ones_are_good_and_others_are_nothing() -> None:
    x, features, labels = items(20, 10)
    new = np.arange(200) % 5 == 0
    index = committed(indexed(x[~new], features[~new], [labels[i] for i in np.flatnonzero(~new)]))
    assert words(index, x[new], features[new]).count("good") > 35
    other = torch.zeros(30, 32)
    other[:, 16:] = torch.randn(30, 16)  # alike in the head's eyes, but not to the backbone
    assert words(index, x[:30], normalize(other)) == ["nothing"] * 30


def test_numbers_are_those_of_the_rule() -> None:
    x, features, labels = items(9, 6)
    index = committed(indexed(x, features, labels))
    rule = index.about.open_set
    assert rule is not None
    codes = torch.arange(9).repeat_interleave(6)
    half = features.half().float()  # as they are kept
    sums, learned = class_sums(half, codes), class_sums(x, codes)
    unknown = near(x, learned, codes, unknown=True)
    assert rule.unknown == pytest.approx(quantiles(unknown, 9), abs=1e-5)
    limit = float(np.quantile(far(half, sums, codes).numpy(), 0.95))
    assert rule.far_limit == pytest.approx(limit, abs=1e-5)
    [query] = queries_of(index, Encoded(x[:1], features[:1]))
    [found] = judged(index, [query])
    assert query.far == pytest.approx(float(far(features[:1], sums)), abs=1e-5)
    assert found.numbers["near"] == pytest.approx(float(near(x[:1], learned)), abs=1e-5)
    assert found.numbers["unknown_fraction"] == rule.fraction(found.numbers["near"])
    answer = search(index, encoder(), query, 3)
    assert (answer.match, answer.sentence) == (found.match, found.sentence)
    assert dict(answer.numbers) == dict(found.numbers)


def test_an_item_of_the_index_is_taken_out_of_its_class() -> None:
    """Alone in its class it would else be the best match of itself."""
    x, features, labels = items(12, 6)
    labels[0] = "alone"
    index = committed(indexed(x, features, labels))
    [found] = judged(index, [Query(x[0])], without="0.jpg")
    index.delete(["0.jpg"])
    [without] = judged(committed(index), [Query(x[0])])
    assert found.numbers["near"] == pytest.approx(without.numbers["near"], abs=1e-5)


def test_what_is_added_removed_and_relabelled_counts_at_once() -> None:
    """The same numbers as of an index that never was another one."""
    x, features, labels = items(12, 6)
    more = items(6, 6, seed=1)
    index = committed(indexed(x, features, labels))
    assert words(index, more[0], more[1]).count("nothing") > 20
    added = [
        Item(f"more {i}", label, vector=v)
        for i, (v, label) in enumerate(zip(more[0], more[2], strict=True))
    ]
    index.put(with_features(added, more[1], 108))
    assert "nothing" not in words(committed(index), more[0], more[1])
    index.delete([item.name for item in added])
    index.put([Item(f"{i}.jpg", "another") for i in range(6)])  # "it is X", for all of a class
    labels[:6] = ["another"] * 6
    expected = committed(indexed(x, features, labels)).about.open_set
    found = committed(index).about.open_set
    assert found is not None
    assert expected is not None
    assert found.far_limit == pytest.approx(expected.far_limit, abs=1e-6)
    assert found.unknown == pytest.approx(expected.unknown, abs=1e-6)


def test_of_trained_classes_the_folds_tell() -> None:
    x, features, labels = items(12, 6)
    of_folds = open_set().unknown
    names = sorted({label for label in labels if label})
    index = indexed(x, features, labels)
    trained = calibrated(index, encoder(*names, unknown=of_folds)).open_set
    assert trained is not None
    assert trained.unknown == pytest.approx(of_folds, abs=1e-6)
    unknown = calibrated(index, encoder(*names)).open_set  # no folds: nothing is a good match
    assert unknown is not None
    assert unknown.unknown is None
    unseen = calibrated(index, encoder("others", unknown=of_folds)).open_set
    assert unseen == calibrated(index, encoder()).open_set
    some = calibrated(index, encoder(*names[3:], unknown=of_folds)).open_set  # 18 new items
    assert some is not None
    assert some.unknown not in (None, trained.unknown, unseen.unknown if unseen else None)
    with pytest.raises(RunError, match="holds unknown that nofuss did not write"):
        calibrated(index, encoder(*names, unknown=[1]))


def test_without_labels_each_item_is_a_class() -> None:
    x, features, _ = items(10, 6)
    index = committed(indexed(x, features, [None] * 60))
    rule = index.about.open_set
    assert rule is not None
    assert (rule.classes, rule.unknown, index.about.relatives) == (60, None, None)
    assert set(words(index, x, features)) == {"unsure"}
    far_off = normalize(torch.eye(32)[16:] - 1)
    assert set(words(index, x[:16], far_off)) == {"nothing"}


def test_an_index_without_features_has_no_verdict() -> None:
    x, _, labels = items(10, 6)
    index = committed(Index.build(x, names=range(60), labels=labels))
    assert index.about.open_set is None
    assert words(index, x[:2], x[:2]) == ["unknown"] * 2


def test_a_large_index_is_calibrated_on_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes knows which items are drawn, and only these keep features."""
    monkeypatch.setattr(verdict, "SAMPLED", 100)
    monkeypatch.setattr("nofuss.search.folder.SAMPLED", 100)
    x, features, labels = items(60, 10)
    index = indexed(x[:300], features[:300], labels[:300])
    rest = [Item(f"{i}.jpg", labels[i], vector=x[i]) for i in range(300, 600)]
    index.put(with_features(rest, features[300:], 600))  # by another process
    committed(index).save(tmp_path)
    index = Index.load(tmp_path)
    kept = {item.name for item in index.items(vectors=True) if item.features is not None}
    assert kept == set(sorted(index.names, key=draw)[:100]) == set(index.sample(100))
    rule = index.about.open_set
    assert rule is not None
    assert rule.items == 100
    assert words(index, x, features).count("nothing") < 60


def test_a_query_of_pictures_is_embedded_once() -> None:
    """The same answer as by vector and features."""
    embedder = build_embedder("convnet", dim=16, channels=3, weights=None)
    model = Encoder(embedder)
    random = np.random.default_rng(0)
    pictures = [
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(12)
    ]
    encoded = model.encode(pictures)
    assert torch.equal(encoded.vectors, model.embed(pictures))
    torch.testing.assert_close(encoded.features.norm(dim=1), torch.ones(12))
    index = indexed(encoded.vectors, encoded.features, ["a", "b", "c"] * 4)
    index.commit(calibrated(index, model))
    answer = search(index, model, pictures[3], 1)
    assert [hit.name for hit in answer.hits] == ["3.jpg"]
    assert answer.numbers["far"] is not None
