"""The folder index: neighbours equal to brute force, survival on disk, refusals."""

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from nofuss import Index
from nofuss.errors import RunError
from nofuss.files import LOCK, sha256
from nofuss.geometry import normalize
from nofuss.model.manifest import FORMAT
from nofuss.ranking.neighbours import nearest
from nofuss.search import folder
from nofuss.search.folder import FolderIndex
from nofuss.search.index import About, Hits, Item, key_of
from tests.search.verdicts import open_set


def random(n: int, dim: int = 8, *, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def names_of(n: int) -> list[str]:
    return [f"{i}.jpg" for i in range(n)]


def search(index: Index, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances and rows (Q, k) of items whose names are those of `names_of`."""
    found = index.search(queries, k)
    rows = [[int(name.removesuffix(".jpg")) for name in hits.names] for hits in found]
    return torch.tensor([hits.distances for hits in found]), torch.tensor(rows)


def brute_force(queries: Tensor, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All distances in double precision, sorted whole; equal ones by row."""
    q, x = normalize(queries).double(), normalize(vectors).double()
    found, rows = torch.empty(len(q), k), torch.empty(len(q), k, dtype=torch.int64)
    for i in range(len(q)):
        d = (x - q[i]).norm(dim=1)
        order = np.lexsort((np.arange(len(x)), d.numpy()))[:k].copy()
        found[i], rows[i] = d[order].float(), torch.from_numpy(order)
    return found, rows


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 300),
    dim=st.integers(1, 9),
    k=st.integers(1, 70),
    copies=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_neighbours_are_those_of_brute_force(
    n: int, dim: int, k: int, copies: int, seed: int
) -> None:
    """Also with fewer items than asked for, and with many copies of one: ties go by row."""
    vectors = normalize(random(n, dim, seed=seed))[torch.arange(n) // copies]
    queries = normalize(torch.cat([random(3, dim, seed=seed + 1), vectors[:2]]))
    found, rows = nearest(queries, vectors, k)
    k = min(k, n)
    expected, expected_rows = brute_force(queries, vectors, k)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert found.diff(dim=1).ge(0).all()
    same = expected.diff(dim=1).abs() > 1e-6  # rounding may swap what is not apart
    apart = torch.ones(len(rows), k, dtype=torch.bool)
    apart[:, 1:] &= same
    apart[:, :-1] &= same
    assert (rows == expected_rows)[apart].all()


def test_copies_are_listed_in_the_order_of_their_rows() -> None:
    """Everything is one point, over many tiles and blocks."""
    found, rows = nearest(torch.ones(2, 4) / 2, torch.ones(40_000, 4) / 2, 100)
    assert (rows == torch.arange(100)).all()
    assert (found == 0).all()


def test_more_queries_and_vectors_than_a_block() -> None:
    vectors, queries = random(5_000), random(1_100, seed=3)
    found, rows = search(Index.build(vectors, names=names_of(5_000)), queries, 5)
    few = [0, 1, 1023, 1024, 1099]
    expected, expected_rows = brute_force(queries[few], vectors, 5)
    torch.testing.assert_close(found[few], expected, atol=1e-6, rtol=0)
    assert (rows[few] == expected_rows).all()


def test_neighbours_are_those_of_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    vectors, queries = normalize(random(3_000, 32)), normalize(random(20, 32, seed=5))
    flat = faiss.IndexFlatL2(32)
    flat.add(vectors.numpy())
    squared, rows = flat.search(queries.numpy(), 10)
    found, ours = search(Index.build(vectors, names=names_of(3_000)), queries, 10)
    assert (ours.numpy() == rows).all()
    np.testing.assert_allclose(found.numpy(), np.sqrt(squared), atol=1e-5)


def test_by_hand() -> None:
    """Lengths do not matter; a right angle is √2 away, the opposite 2."""
    index = Index.build(
        np.array([[5.0, 0.0], [0.0, 0.1], [-1.0, 0.0]]), names=["east", "north", "west"]
    )
    [hits] = index.search(np.array([[2.0, 0.0]]), 3)
    assert hits.names == ["east", "north", "west"]
    assert hits.distances == pytest.approx([0.0, 2**0.5, 2.0])


def test_items_are_put_replaced_and_deleted_by_name() -> None:
    """Many small additions, as `nofuss index` makes them, equal one large one."""
    x = normalize(random(600, 4))
    index = FolderIndex(About("model", 4, {"shop": {"price": "number"}}))
    for i in range(600):
        index.put([Item(f"{i}.jpg", "old", {"price": i}, "shop", f"{i}", x[i])])
    assert index.names == names_of(600)
    torch.testing.assert_close(index.vectors, x)
    early = index.get(["1.jpg"], vectors=True)
    index.put([Item("3.jpg", None, {}, "shop", "new"), Item("7.jpg", "new", vector=x[0])])
    assert index.get(["3.jpg", "gone.jpg"]) == [Item("3.jpg", None, {}, "shop", "new")]
    [revised, replaced] = index.get(["3.jpg", "7.jpg"], vectors=True)
    assert revised.vector is not None
    assert replaced.vector is not None
    torch.testing.assert_close(revised.vector, x[3])  # without a vector the former one stays
    torch.testing.assert_close(replaced.vector, x[0])
    assert (replaced.label, replaced.source) == ("new", "")
    index.delete(["1.jpg", "4.jpg", "never.jpg"])
    assert index.count() == len(index) == 598
    assert "4.jpg" not in index
    assert index.search(x[5:6], 1)[0].names == ["5.jpg"]
    assert len(list(index.items("shop"))) == 597
    assert [item.name for item in index.items()] == index.names
    assert early[0].vector is not None
    torch.testing.assert_close(early[0].vector, x[1])


def test_every_item_has_a_key() -> None:
    index = Index.build(random(3), names=["/a/b.jpg", "not utf-8 \udcff", "c"])
    for name in index.names:
        assert len(key_of(name)) == 16
        assert index.find(key_of(name)) == name
    assert index.find(key_of("d")) is None
    index.delete(["c"])
    assert index.find(key_of("c")) is None


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    labels = [None if i % 3 else f"class {i % 2}" for i in range(100)]
    names = [*names_of(98), "<img onerror=x>", "not utf-8 \udcff"]
    index = Index.build(random(100), names=names, labels=labels, columns={"price": [*range(100)]})
    index.put([Item("0.jpg", "a", {"price": 0.5}, "Python", "digest")])
    index.about = index.about._replace(open_set=open_set(), relatives=3)
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    assert list(loaded.items()) == list(index.items())
    assert loaded.about == index.about
    assert index.search(random(5), 7) == loaded.search(random(5), 7)
    loaded.put([Item("1.jpg", vector=random(1)[0])])  # the file is not written to
    assert torch.equal(Index.load(tmp_path / "index").vectors, index.vectors)


def test_what_could_not_be_read_again_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Index.build(random(2), names=names_of(2)).save(tmp_path)
    monkeypatch.setattr(folder, "memory", lambda: 24 * 1000)
    with pytest.raises(RunError, match="too small for the names and columns of 100 items"):
        Index.build(random(100), names=names_of(100)).save(tmp_path)
    assert len(Index.load(tmp_path)) == 2


def test_a_column_may_change_its_type() -> None:
    index = Index.build(random(2), names=["a", "b"], columns={"price": [1, 2]})
    index.commit(index.about._replace(sources={"Python": {"price": "text"}}))
    assert [dict(item.columns) for item in index.items()] == [{}, {}]
    index.put([Item("a", None, {"price": "about 1"})])
    assert index.search(random(1), 2, where="price == 'about 1'")[0].names == ["a"]


def test_saving_again_leaves_no_old_files(tmp_path: Path) -> None:
    index = Index.build(random(10), names=names_of(10))
    index.save(tmp_path)
    (tmp_path / "mine.txt").write_text("not the index's")
    loaded = Index.load(tmp_path)
    loaded.delete(["0.jpg"])
    loaded.save(tmp_path)  # over the file that it has mapped
    assert len(Index.load(tmp_path)) == 9
    assert len([path for path in tmp_path.iterdir() if path.name != LOCK]) == 4


@pytest.mark.slow
def test_two_writers_at_once_leave_a_whole_index(tmp_path: Path) -> None:
    """Real processes, which would otherwise clear away each other's new files."""
    script = (
        "import sys, torch; from nofuss.search import Index\n"
        "for i in range(40):\n"
        "    g = torch.Generator().manual_seed(int(sys.argv[2]) + i)\n"
        "    vectors = torch.randn(9, 4, generator=g)\n"
        "    Index.build(vectors, names=list('abcdefghi')).save(sys.argv[1])\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(seed)])
        for seed in (0, 1000)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert len(Index.load(tmp_path)) == 9
    assert len(list(tmp_path.glob("vectors-*"))) == 1


def test_a_crash_before_the_manifest_leaves_the_former_index(tmp_path: Path) -> None:
    """The manifest is written last: with the old one, new files beside it change nothing."""
    Index.build(random(10), names=names_of(10)).save(tmp_path)
    former = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    Index.build(random(5), names=names_of(5)).save(tmp_path)
    for name, content in former.items():
        (tmp_path / name).write_bytes(content)
    assert len(Index.load(tmp_path)) == 10


def test_every_damage_is_refused_in_one_line(tmp_path: Path) -> None:
    Index.build(random(10), names=names_of(10)).save(tmp_path)
    for file in sorted(path for path in tmp_path.iterdir() if path.name != LOCK):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damage in (b"", content[:-1], bytes(flipped), b"{}", b"[]", None):
            if damage is None:
                file.unlink()
            else:
                file.write_bytes(damage)
            if file.name == "index.json" and damage == content[:-1]:
                continue  # only its last line end is missing
            with pytest.raises(RunError) as error:
                Index.load(tmp_path)
            assert "\n" not in str(error.value)
        file.write_bytes(content)
    assert len(Index.load(tmp_path)) == 10


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    Index.build(random(3), names=names_of(3)).save(tmp_path)
    manifest = json.loads((tmp_path / "index.json").read_text())
    manifest["files"]["items"] = "/../../etc/passwd"
    manifest.pop("checksum")
    (tmp_path / "index.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="did not write its manifest"):
        Index.load(tmp_path)


def test_misuse_is_told() -> None:
    index = Index.build(random(3), names=names_of(3), columns={"price": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"'x' twice"):
        index.put([Item("x", vector=random(1)[0])] * 2)
    with pytest.raises(ValueError, match="'x' is new to the index, so it needs a vector"):
        index.put([Item("x")])
    with pytest.raises(ValueError, match="9 dimensions; the index has 8"):
        index.search(random(1, 9))
    with pytest.raises(ValueError, match="9 dimensions; the index has 8"):
        index.put([Item("x", vector=random(1, 9)[0])])
    with pytest.raises(ValueError, match="2 vectors, 1 names"):
        Index.build(random(2), names=["z"])
    for number in (torch.nan, torch.inf, 1e25):
        with pytest.raises(ValueError, match="NaN"):
            index.search(torch.full((1, 8), number))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(random(1), 0)
    with pytest.raises(ValueError, match=r"price is number in the index, and '0.jpg' has '7'"):
        index.put([Item("0.jpg", None, {"price": "7"})])
    with pytest.raises(ValueError, match="column shop has no type yet"):
        index.put([Item("0.jpg", None, {"shop": "north"})])
    with pytest.raises(ValueError, match="can't be called label"):
        index.put([Item("0.jpg", None, {"label": "north"})])
    with pytest.raises(ValueError, match="got a mixture"):
        Index.build(random(2), names=["a", "b"], columns={"price": ["7", 7]})
    with pytest.raises(ValueError, match="2 values of price for 1 items"):
        Index.build(random(1), names=["a"], columns={"price": [7, 8]})
    assert [item.columns["price"] for item in index.items()] == [1, 2, 3]


def test_an_empty_index_finds_nothing(tmp_path: Path) -> None:
    index = Index.build(torch.empty(0, 8), names=[])
    index.save(tmp_path)
    assert Index.load(tmp_path).search(random(2), 5) == [Hits([], [])] * 2


# What no `save` writes, with checksums that fit


def forged(folder: Path, tensors: dict[str, Tensor], items: dict[str, object]) -> Path:
    """An index with this content, vouched for by its manifest."""
    folder.mkdir()
    save_file(tensors, folder / "vectors")
    (folder / "items").write_text(json.dumps(items))
    sums = {part: sha256(folder / part) for part in ("vectors", "items")}
    for part, suffix in (("vectors", "safetensors"), ("items", "json")):
        (folder / part).rename(folder / f"{part}-{sums[part][:16]}.{suffix}")
    about = {"format": FORMAT, "model": "", "dim": 8}
    about |= {k: v for k, v in items.items() if k in ("open_set", "relatives")}
    manifest = {"format": FORMAT, "model": "", "version": 1, "feedback": 0, "history": []}
    (folder / "index.json").write_text(json.dumps(manifest | {"files": sums, "about": about}))
    return folder


def parts(**changes: object) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Three sound items, but for what is changed."""
    tensors = {"vectors": normalize(random(3)), "labels": torch.tensor([0, -1, 1])}
    items = {"names": ["a", "b", "c"], "classes": ["x", "y"], "open_set": None, "relatives": 1}
    items |= {"sources": {"s": {"price": "number"}}, "columns": {"price": [1, None, 2.5]}}
    items["origins"] = [["s", "digest"], ["", ""], ["s", ""]]
    items["splits"] = ["train", "test", None]
    tensors |= {k: v for k, v in changes.items() if k in tensors}  # type: ignore[misc]
    items |= {k: v for k, v in changes.items() if k in items}  # type: ignore[misc]
    return tensors, items


def test_a_sound_forgery_opens(tmp_path: Path) -> None:
    """What the tests below rest on."""
    index = Index.load(forged(tmp_path / "index", *parts()))
    assert index.labels == ["x", None, "y"]


@pytest.mark.parametrize(
    "changes",
    [
        {"vectors": torch.full((3, 8), torch.nan)},
        {"vectors": torch.full((3, 8), 1e30)},
        {"vectors": normalize(random(3)).half()},
        {"vectors": normalize(random(3))[None]},
        {"vectors": torch.empty(3, 0)},
        {"vectors": normalize(random(3, 9))},
        {"vectors": normalize(random(2))},
        {"labels": torch.zeros(3)},
        {"labels": torch.tensor([0, 1, 2])},
        {"labels": torch.tensor([0, 1, -2])},
        {"names": ["a", "b"]},
        {"names": ["a", "b", "b"]},
        {"names": ["a", "b", 3]},
        {"names": "abc"},
        {"classes": ["x", "x"]},
        {"classes": {"0": "x"}},
        {"open_set": {"rule": "mine"}},
        {"relatives": -1},
        {"sources": []},
        {"sources": {"s": {"price": "money"}}},
        {"sources": {"s": {"label": "text"}}},
        {"columns": []},
        {"columns": {"price": [1, 2]}},
        {"columns": {"price": ["1", 2, 3]}},
        {"columns": {"price": [1e999, 2, 3]}},
        {"columns": {"shop": [1, 2, 3]}},
        {"origins": [["s", ""], ["s", ""]]},
        {"origins": [["s", ""], ["s", ""], ["s", 3]]},
        {"origins": [["s", ""], ["s", ""], None]},
        {"splits": ["train", "test"]},
        {"splits": ["train", "mine", None]},
    ],
)
def test_a_forged_index_is_one_line(changes: dict[str, object], tmp_path: Path) -> None:
    folder = forged(tmp_path / "index", *parts(**changes))
    with pytest.raises(RunError, match=r"can't be read .*; delete the folder") as caught:
        Index.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_what_is_wrong_with_the_machine_is_no_reason_to_delete_an_index(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> str:
        raise error

    folder = forged(tmp_path / "index", *parts())
    monkeypatch.setattr("nofuss.model.manifest.sha256", failing)
    with pytest.raises(type(error)) as caught:
        Index.load(folder)
    assert caught.value is error


HALVES = normalize(random(2)).half()


@pytest.mark.parametrize("features", [HALVES, HALVES.float(), HALVES * 2, HALVES[0], HALVES[:1]])
def test_features_are_checked(features: Tensor, tmp_path: Path) -> None:
    folder = forged(tmp_path / "index", *parts())
    save_file(
        {"features": features.contiguous(), "rows": torch.tensor([2, 0])}, folder / "features"
    )
    checksum = sha256(folder / "features")
    (folder / "features").rename(folder / f"features-{checksum[:16]}.safetensors")
    manifest = json.loads((folder / "index.json").read_text())
    manifest["files"]["features"] = checksum
    (folder / "index.json").write_text(json.dumps(manifest))
    if features is not HALVES:
        with pytest.raises(RunError, match="can't be read"):
            Index.load(folder)
        return
    found = {item.name: item.features for item in Index.load(folder).items(vectors=True)}
    assert [name for name, of in found.items() if of is not None] == ["a", "c"]
    assert torch.equal(found["c"], HALVES[0])


def test_a_reader_always_finds_a_whole_index(tmp_path: Path) -> None:
    """While another thread replaces it again and again, and removes the files of the former."""
    indexes = [Index.build(random(n), names=names_of(n)) for n in (20, 30)]
    indexes[0].save(tmp_path)
    done = threading.Event()

    def replace() -> None:
        for i in range(60):
            indexes[i % 2].save(tmp_path)
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        assert len(Index.load(tmp_path)) in (20, 30)
    writer.join()
    assert len([path for path in tmp_path.iterdir() if path.name != LOCK]) == 3


def test_labels_and_names_may_be_numbers(tmp_path: Path) -> None:
    index = Index.build(np.eye(3), names=np.arange(3), labels=np.array([7, 7, 8]))
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert again.names == ["0", "1", "2"]
    assert again.labels == ["7", "7", "8"]
