"""`nofuss search` as a user meets it: through the command line's own door."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nofuss
from nofuss.cli import main
from nofuss.config import to_json
from nofuss.data.corrections import Correction
from nofuss.files import read_json, write_json
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.ranking.rerank import Rerank
from nofuss.run.directory import create_run
from nofuss.search import Index
from nofuss.search.feedback import Mark, append, learned, read_feedback
from tests.asked import settings_of
from tests.tiny_run import untrained_pictures, write_pictures

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "data", per_class=3)


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    return untrained_pictures(data, tmp_path / "run")


def index_of(run: Path) -> Index:
    return Index.load(run / "index")


def lines(capture: Capture) -> str:
    printed = capture.readouterr()
    assert not printed.err
    return printed.out


@pytest.mark.slow
def test_a_search_loads_no_more_than_it_needs(run: Path, data: Path) -> None:
    """It takes less processor time than importing torch, which it can't do without."""
    main(["index", str(run), str(data)])
    words = ["search", str(run), str(data / "six" / "0<i>.png")]
    script = (
        "import sys, time, torch; began = time.process_time(); from nofuss.cli import main; "
        f"main({words!r}); print(*sys.modules); print(time.process_time() / began)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *_, modules, seconds = ran.stdout.splitlines()
    loaded = {module for module in modules.split() if not module.startswith("torch.")}
    assert "nofuss.search.search" in loaded
    writing = {"nofuss.search.update", "nofuss.training", "nofuss.report"}
    others = {"matplotlib", "sklearn", "scipy", "jinja2", "starlette", "timm", "psycopg"}
    assert not loaded & (writing | others)
    assert float(seconds) < 2


def test_search_prints_paths_labels_and_distances(run: Path, data: Path, capsys: Capture) -> None:
    main(["index", str(run), str(data)])
    query = data / "six" / "0<i>.png"
    assert main(["search", str(run), str(query), "-k", "3"]) == 0
    printed = lines(capsys)
    said, *found = [line for line in printed.splitlines() if line.startswith("  ")]
    assert said.startswith("  ? Not sure: too few classes")
    assert len(found) == 3
    assert found[0] == f"  0.000  six  {query}"


def test_search_goes_by_what_people_said(run: Path, data: Path, capsys: Capture) -> None:
    """As the page does: by corrected labels at once, by marks once they were learned from."""
    main(["index", str(run), str(data)])
    query = str(data / "six" / "0<i>.png")

    def found() -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["search", str(run), query, "-k", "100", "--json"]) == 0
        neighbours: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["queries"][0][
            "neighbours"
        ]
        return neighbours

    before = found()
    append(run, [Correction(query, "six", "plain"), Mark(query, before[-1]["path"], True)])
    said = found()
    assert said[0]["label"] == "plain"
    assert [n["distance"] for n in said] == [n["distance"] for n in before]
    index = Index.load(run / "index")
    after = learned(index, read_feedback(run), history=(0,))
    after.commit(after.about)
    assert found()[-1]["path"] != before[-1]["path"]


def test_json_of_several_queries_equals_brute_force(run: Path, data: Path, capsys: Capture) -> None:
    main(["index", str(run), str(data)])
    capsys.readouterr()
    queries = [data / "six" / "0<i>.png", data / "plain" / "1<i>.png"]
    assert main(["search", str(run), *map(str, queries), "-k", "4", "--json"]) == 0
    content = json.loads(lines(capsys))
    index, encoder = index_of(run), nofuss.load(run)
    for query, result in zip(queries, content["queries"], strict=True):
        d = (index.vectors - encoder.embed([query])).norm(dim=1)
        assert [n["distance"] for n in result["neighbours"]] == pytest.approx(
            d.sort().values[:4].tolist(), abs=1e-5
        )
        assert {n["path"] for n in result["neighbours"]} == {
            index.names[i] for i in d.argsort()[:4].tolist()
        }
        assert result["found"] is True
        assert result["open_set"]["far"] <= content["open_set"]["far_limit"]
    assert content["open_set"]["items"] == 19
    assert content["rerank"] is None


def test_a_filter_turns_off_what_is_about_the_whole_index(
    run: Path, data: Path, capsys: Capture
) -> None:
    pictures = sorted(data.rglob("*.png"))
    table = data / "list.csv"
    rows = [f"{path.relative_to(data)},a,{i}" for i, path in enumerate(pictures)]
    table.write_text("\n".join(["path,label,price", *rows]))
    model = read_json(run / "model" / "model.json")
    rerank = Rerank([0.1, 0.05, 0.2])
    model["extra"]["rerank"] = to_json(rerank)
    write_json(run / "model" / "model.json", model)
    words = ["search", str(run), str(data / "six" / "0<i>.png")]
    main(["index", str(run), str(table)])

    def found(*more: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*words, "--json", *more]) == 0
        content: dict[str, Any] = json.loads(lines(capsys))
        return content

    content = found()
    assert content["rerank"] is not None
    assert content["open_set"] is not None
    assert content["queries"][0]["sentence"]
    content = found("--where", "price<9")
    assert (content["rerank"], content["open_set"]) == (None, None)
    [answer] = content["queries"]
    assert (answer["match"], answer["sentence"]) == ("unknown", "")
    distances = [neighbour["distance"] for neighbour in answer["neighbours"]]
    assert distances == sorted(distances)
    assert main([*words, "--where", "price<0"]) == 0
    assert lines(capsys).splitlines() == [words[2], "  nothing passes the filter"]
    assert main([*words, "--where", "price<"]) == 2


def write_plain(folder: Path, colours: dict[str, tuple[int, int, int]], *, spread: int) -> Path:
    """Eight pictures a class: its colour in every pixel, up to `spread` brighter or darker."""
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for number in range(8):
            random = np.random.default_rng([number, *colour])
            change = random.integers(-spread, spread + 1, (40, 40, 3))
            pixels = (np.array(colour) + change).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.slow
def test_nothing_similar(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """Calibrated on the index, again whenever it changes."""
    colours = {str(c): c for c in np.ndindex(2, 2, 2)}
    few = {n: (250 * r, 250 * g, 250 * b) for n, (r, g, b) in colours.items() if r + g + b < 3}
    white = {"white": (250, 250, 250)}
    main(["index", str(run), str(write_plain(tmp_path / "few", few, spread=9))])
    assert 'search says "nothing similar" to what is less like any class here' in lines(capsys)
    before = index_of(run).about.open_set
    assert before is not None
    assert (before.items, before.classes) == (56, 7)
    query = write_plain(tmp_path / "grain", {"white": (250, 250, 250)}, spread=11) / "white/3.png"
    assert main(["search", str(run), str(query)]) == 0
    assert "✗ Nothing similar found." in lines(capsys)
    item = tmp_path / "few" / "(1, 0, 0)" / "0.png"
    assert main(["search", str(run), str(item), "--json"]) == 0
    content = json.loads(lines(capsys))
    (result,) = content["queries"]
    assert result["found"] is True
    assert result["match"] in ("good", "unsure")
    assert result["sentence"].startswith(("Good match: ", "Not sure: "))
    assert result["open_set"]["far"] < result["open_set"]["far_limit"] == before.far_limit
    assert content["open_set"]["near_limit"] == before.near_limit

    main(["index", str(run), str(write_plain(tmp_path / "white", white, spread=9))])
    after = index_of(run).about.open_set
    assert after is not None
    assert (after.items, after.classes) == (64, 8)
    assert after != before
    capsys.readouterr()
    assert main(["search", str(run), str(query)]) == 0
    assert "Nothing similar" not in lines(capsys)
    main(["index", str(run), str(tmp_path / "few"), "--remove"])
    left = index_of(run).about.open_set
    assert left is not None
    assert (left.items, left.classes, left.unknown) == (8, 1, None)


@pytest.mark.parametrize("name", ["unknown", "rerank"])
def test_what_nofuss_did_not_write_is_one_line(
    name: str, run: Path, data: Path, capsys: Capture
) -> None:
    file = run / "model" / "model.json"
    model = read_json(file)
    model["class_names"] = ["plain"]  # folds tell of trained classes
    model["extra"][name] = {"rule": "mine"}
    write_json(file, model)
    query = str(data / "six" / "0<i>.png")
    codes = {main(["index", str(run), str(data)]), main(["search", str(run), query])}
    printed = capsys.readouterr().err
    assert codes != {0}
    assert f"model.json holds {name} that nofuss did not write" in printed
    assert len([line for line in printed.splitlines() if name in line]) == 1


def test_another_model_is_noticed(run: Path, data: Path, capsys: Capture) -> None:
    main(["index", str(run), str(data)])
    shutil.rmtree(run / "model")
    embedder = build_embedder("convnet", dim=8, channels=3, weights=None, seed=1)
    save_model(run / "model", embedder)
    capsys.readouterr()
    query = str(data / "six" / "0<i>.png")
    assert main(["search", str(run), query]) == 2
    assert "another model" in capsys.readouterr().err
    assert main(["index", str(run), str(data)]) == 0
    assert "19 new" in lines(capsys)
    assert main(["search", str(run), query]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "RUN"], "PICTURE is missing"),
        (["search", "RUN", "missing.jpg"], "no index in"),
        (["search", "RUN", "missing.jpg", "-k", "0"], "-k is 0"),
        (["index", "RUN", "nowhere"], "nowhere does not exist"),
        (["search", "nowhere", "a.jpg"], "nowhere is not a run directory"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, run: Path, capsys: Capture
) -> None:
    assert main([str(run) if a == "RUN" else a for a in arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.count("\n") == 1


def test_a_damaged_index_is_one_line(run: Path, data: Path, capsys: Capture) -> None:
    main(["index", str(run), str(data)])
    (vectors,) = (run / "index").glob("vectors-*")
    vectors.write_bytes(vectors.read_bytes()[:-4])
    capsys.readouterr()
    assert main(["search", str(run), str(data / "six" / "0<i>.png")]) == 2
    complaint = capsys.readouterr().err
    assert "can't be read" in complaint
    assert complaint.count("\n") == 1


def test_an_index_without_its_manifest_is_not_taken_for_none(
    run: Path, data: Path, capsys: Capture
) -> None:
    """Else other items would be searched in silence."""
    main(["index", str(run), str(data)])
    for manifest in (run / "index").glob("*.json"):
        manifest.unlink()
    capsys.readouterr()
    query = str(data / "six" / "0<i>.png")
    assert main(["search", str(run), query]) == 2
    assert "make one: nofuss index" in capsys.readouterr().err
    assert main(["index", str(run), str(data)]) == 0
    assert main(["search", str(run), query]) == 0


def test_vectors_are_searched_by_rows(tmp_path: Path, capsys: Capture) -> None:
    vectors = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", vectors=vectors, labels=np.arange(30) % 3)
    np.savez(tmp_path / "query.npz", vectors=vectors[[4]], labels=[0])
    settings = settings_of(data=tmp_path / "data.npz", out=tmp_path / "run")
    made = create_run(settings, name="run")
    save_model(made.model, build_embedder("identity", dim=4, channels=6))
    query = str(tmp_path / "query.npz")
    main(["index", str(made.path)])
    capsys.readouterr()
    assert main(["search", str(made.path), query, "-k", "1", "--json"]) == 0
    (result,) = json.loads(lines(capsys))["queries"]
    assert result["neighbours"][0]["path"] == f"{tmp_path / 'data.npz'}#4"
    assert result["found"] is True
