"""Every page of the documentation: its Python runs, its commands run, the site builds strictly.

Pages run one after the other in a copy of one small world: photos of four classes, a run on them,
vectors. Blocks that can't run here say why, in a comment `<!-- not run: reason -->` above them.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nofuss
from nofuss.cli import COMMANDS, main, parse
from nofuss.data.corrections import Correction
from nofuss.search.feedback import append
from tests.doc_blocks import Block, blocks, commands, mentions
from tests.running import started
from tests.tiny_run import draw

ROOT = Path(nofuss.__file__).parents[1]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no docs")
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")]) if DOCS.is_dir() else []
NOTES = sorted(DOCS.glob("lab/*.md"))
"""Experiments: their commands take hours, so they are only parsed."""
# Commands of ours that are only parsed: what they do is run elsewhere.
PARSED = {
    "reproduce": "takes a quarter of an hour; tests/paper runs it on small data",
    "push": "needs the Hub; tests/model/test_hub.py runs it against a stand-in",
    "demo": "takes three minutes; it is `nofuss train` on the built-in set",
}
ONCE = {"export", "serve"}
"""Commands that are slow, and the same on every page: the first use is run, others are parsed."""
OTHERS = {
    "apt-get",
    "cd",
    "docker",
    "git",
    "hf",
    "make",
    "pip",
    "pipx",
    "python",
    "tensorboard",
    "uv",
    "uvx",
}
"""Programs that are not ours; what is said of make, pip and python is checked, not run."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages name."""
    folder = tmp_path_factory.mktemp("world")
    places = {"photos": range(4), "new": range(3, 6), "more": range(2), "DATA": range(4)}
    places["objects"] = range(4)  # examples/rendered_objects.py makes it; test_examples.py runs it
    for place, labels in places.items():
        side = 120 if place == "DATA" else 64  # small ones take a small network
        for label in labels:
            (folder / place / f"class {label}").mkdir(parents=True)
            for number in range(5):
                picture = draw(label, number).resize((side, side))
                picture.save(folder / place / f"class {label}" / f"{number}.png")
    for name in ("query.jpg", "a.jpg", "b.jpg"):
        draw(1, 9).resize((120, 120)).save(folder / name)
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 8)
    vectors = random.normal(size=(12, 32))[labels] + 0.3 * random.normal(size=(96, 32))
    vectors = vectors.astype(np.float32)
    np.savez(folder / "features.npz", vectors=vectors, labels=labels)
    np.savez(folder / "queries.npz", vectors=vectors[:3])
    rows = [
        f"photos/class {c}/{n}.png,{c},{'train' if c < 2 else 'query' if n < 2 else 'gallery'}\n"
        for c in range(4)
        for n in range(5)
    ]
    (folder / "inshop.csv").write_text("path,label,split\n" + "".join(rows))
    rows = [
        ",".join(f"photos/class {k % 4}/{i % 5}.png" for k, i in ((c, n), (c, n + 1), (c + 1, n)))
        for c in range(4)
        for n in range(5)
    ]
    (folder / "triplets.csv").write_text("\n".join(["anchor,positive,negative", *rows]))
    alike = [f"{a},{p},1\n{a},{n},0" for a, p, n in (row.split(",") for row in rows)]
    (folder / "pairs.csv").write_text("\n".join(["a,b,same", *alike]))
    run = nofuss.train(folder / "DATA", out=folder / "RUN", test_fraction=0.5)
    append(run, [Correction("class 0/0.png", "class 0", "class 1")])
    for name in ("photos", "a", "b", "demo"):
        shutil.copytree(run, folder / "runs" / name)
    for name in ("QUERIES", "GALLERY"):
        shutil.copytree(folder / "DATA", folder / name)
    return folder


def given(page: Path) -> dict[str, Any]:
    """Names that a page takes for granted, because its reader has them."""
    random = np.random.default_rng(0)
    names: dict[str, Any] = {"torch": torch, "nofuss": nofuss, "nn": nn, "np": np}
    if page.name == "README.md":
        names |= {
            "X": random.normal(size=(60, 12)).astype(np.float32),
            "y": np.repeat(np.arange(6), 10),
            "X_new": random.normal(size=(5, 12)).astype(np.float32),
            "model": nn.Sequential(nn.Flatten(), nn.LazyLinear(64)),
            "images": torch.randn(8, 3, 4, 4),
            "labels": torch.arange(8),
        }
        names["model"](names["images"])
    if page.name == "losses.md":
        from pytorch_metric_learning.losses import CrossBatchMemory

        names["CrossBatchMemory"] = CrossBatchMemory
    return names


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_runs(
    page: Path,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    shutil.copytree(world, here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back afterwards
    names = given(page)
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.reason:
            check_unrun(block, where)
            continue
        if block.kind == "python":
            if page.name == "README.md":
                shutil.rmtree("runs/photos", ignore_errors=True)  # it is made there again
            exec(compile(block.body, where, "exec"), names)
        elif block.kind in ("", "bash"):
            for words in commands(block):
                run_command(words, where, capsys)
        else:
            assert block.kind in ("text", "json", "csv"), f"{where}: a block of {block.kind!r}"


def check_unrun(block: Block, where: str) -> None:
    """Of a block that can't run here, Python must compile and commands of ours must parse."""
    if block.kind == "python":
        compile(block.body, where, "exec")
    for words in commands(block):
        if words[0] == "nofuss":
            parse(words[1:])


def run_command(words: list[str], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command of ours; check what can be checked of others."""
    program, *rest = words
    if program == "nofuss":
        run_nofuss(rest, where, capsys)
    elif program == "torchrun":
        parse(rest[rest.index("nofuss") + 1 :])
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(rest) <= set(targets), where
    elif program == "pip" and rest[0] == "install":
        check_extras(" ".join(rest), where)
    elif program == "python" and rest[0].startswith("examples/"):
        assert (ROOT / rest[0]).is_file(), where
    else:
        assert program in OTHERS or "/" in program, f"{where}: what is {program}?"


def check_extras(line: str, where: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"nofuss\[([\w,]+)\]", line):
        assert set(extras.split(",")) <= known["optional-dependencies"].keys(), where


done = set[str]()


def run_nofuss(words: list[str], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] in PARSED or (words[0] in ONCE and words[0] in done):
        parse(words)
    elif words[0] == "serve":
        check_page(words)
    else:
        code = main(words)
        said = capsys.readouterr()
        assert code == 0, f"{where}: nofuss {' '.join(words)}\n{said.out}{said.err}"
    done.add(words[0])


def check_page(words: list[str]) -> None:
    """Start the page on a free port, and stop it once it answers."""
    command = [sys.executable, "-m", "nofuss", *words, "--port", "0"]
    with started(command, after="Ctrl-C") as server:  # its address is printed before
        server.terminate()
        assert server.wait(60) == 130


def test_commands_are_all_described() -> None:
    """Every command of ours is used on some page."""
    used = {
        words[1]
        for page in PAGES
        for block in blocks(page)
        for words in commands(block)
        if words[0] == "nofuss"
    }
    assert set(COMMANDS) <= used


def test_every_room_is_explained() -> None:
    """How it works inside names every folder and file of the package's top, and where to begin."""
    text = (DOCS / "inside.md").read_text()
    rooms = re.findall(r"^\| `(\w+)/` \| .* \| `(\w+\.py)` \|$", text, re.M)
    package = ROOT / "nofuss"
    assert {room for room, _ in rooms} == {path.parent.name for path in package.glob("*/*.py")}
    for room, file in rooms:
        assert (package / room / file).is_file(), room
    for file in package.glob("[!_]*.py"):
        assert f"`{file.name}`" in text


@pytest.mark.parametrize(
    "page", [*PAGES, *NOTES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_files_in_the_text_exist(page: Path) -> None:
    """Whatever is moved is moved in the documents, too."""
    text = page.read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    if page.name in ("inside.md", "CONTRIBUTING.md"):
        named += re.findall(r"`([\w/]+/)`", text)
    for name in named:
        places = [ROOT / name, ROOT / "nofuss" / name, *(ROOT / "nofuss").glob(f"*/{name}")]
        assert any(place.exists() for place in places), name
    for module in re.findall(r"python -m\s+((?:benchmarks|tests|torture)[\w.]*)", text):
        place = ROOT / module.rstrip(".").replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), module


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    """A command with arguments must parse; of a name alone there must be a command."""
    for words in mentions(page):
        if len(words) == 1:
            assert words[0] in COMMANDS or words[0].startswith("--"), words
        else:
            parse(words)


def test_the_test_sees_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n\n<!-- not run: needs the Hub -->\n```bash\nnofuss a \\\n  b  # c\n"
        "# d\n```\n- item\n\n    ```\n    nofuss e 'f g'\n    ```\n"
    )
    found = blocks(page)
    assert found[0] == Block("python", "x = 1\n", 1, None)
    assert found[1].reason == "needs the Hub"
    assert commands(found[1]) == [["nofuss", "a", "b"]]
    assert commands(found[2]) == [["nofuss", "e", "f g"]]


@pytest.mark.docs
def test_the_site_builds_strictly_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs pip install 'nofuss[docs]'")
    site = tmp_path / "site"
    # Not --quiet, with which MkDocs does not count its warnings.
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(
        [*command, "--site-dir", str(site)], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = [*site.rglob("*.html")]
    assert len(pages) >= len(PAGES) + len(NOTES) - 1
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', page.read_text())
        assert [each for each in loaded if re.match(r"(https?:)?//", each)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\((['\"]?)(https?:)?//|@import", style.read_text()), style.name
    named = set(re.findall(r'id="nofuss\.(\w+)"', (site / "api.html").read_text()))
    assert set(nofuss.__all__) <= named
