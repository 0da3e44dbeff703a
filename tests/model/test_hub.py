"""Push and load through the real client of the Hub, against a stand-in on loopback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nofuss
from nofuss.commands.push import main as push
from nofuss.errors import RunError, UsageError
from nofuss.files import tensor_bytes
from nofuss.model.hub import Address, parse_address
from nofuss.model.manifest import Manifest, read_manifest, write_manifest
from nofuss.model.saved import model_files
from nofuss.report.card import public_config, without_places
from tests.asked import settings_of
from tests.model.hub_stand_in import TOKEN, Hub, Repository, serving

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs pip install 'nofuss[hub]'")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def run(vector_run: Path) -> Path:
    return vector_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    names = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | names | more


DRIVER = """
import contextlib, io, json, sys
import numpy as np
import nofuss
from nofuss.cli import main
from tests.asked import settings_of

def vectors(address):
    encoder = nofuss.load(address)
    return encoder.source, encoder.embed(np.eye(16, dtype="float32")).tolist()

said = []
for step in json.loads(sys.argv[1]):
    if isinstance(step, str):
        said.append(vectors(step))
        continue
    text = io.StringIO()
    from nofuss.commands import console
    console.out.file = console.err.file = text
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main(step)
    said.append((code, text.getvalue()))
print(json.dumps(said))
"""


def driven(env: dict[str, str], *steps: str | list[str]) -> list[tuple[Any, Any]]:
    """Run commands and loads, one after the other, in a process with this environment.

    A list is a command line, whose exit code and output are returned; a string an address, whose
    pinned address and embeddings are.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(steps)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [(a, b) for a, b in json.loads(done.stdout.splitlines()[-1])]


def embedding(address: object) -> list[str]:
    """A command that loads the model, then finds that its data do not exist."""
    return ["embed", str(address), "missing", "--out", "never-written.npz"]


@pytest.fixture(scope="module")
def address(hub: Hub, home: Path, run: Path) -> Address:
    """The run, pushed for everybody as user/coins and for its owner as user/hidden."""
    former = {"model/weights-0123456789abcdef.safetensors": b"old", "notes.md": b"mine"}
    hub.repositories["user/again"] = Repository(private=False)
    hub.repositories["user/again"].add(former)
    pushes = [["push", str(run), "user/coins", "--public"], ["push", str(run), "user/hidden"]]
    pushes.append(["push", str(run), "user/again"])
    env = environment(hub, home, HF_TOKEN=TOKEN)
    (code, said), (hidden, _), (again, _), (source, _) = driven(env, *pushes, "hf://user/hidden")
    assert code == hidden == again == 0, said
    assert source.startswith("hf://user/hidden@")
    line = next(line for line in said.splitlines() if line.startswith("pushed: "))
    return parse_address(line.removeprefix("pushed: "))


@pytest.mark.slow
def test_what_is_pushed(hub: Hub, run: Path, address: Address) -> None:
    repository = hub.repositories["user/coins"]
    assert not repository.private
    assert hub.repositories["user/hidden"].private
    oid, files = repository.commits[-1]
    assert address == Address("user/coins", oid)
    names = {"config.json", "scores.json", "README.md"}
    own = {f"model/{file.name}": file.read_bytes() for file in model_files(run / "model")}
    assert files.keys() == names | own.keys()
    assert all(files[name] == content for name, content in own.items())
    # The weights of a former model are gone; what somebody else put there stays.
    again = hub.repositories["user/again"].commits[-1][1]
    assert again.keys() == files.keys() | {"notes.md"}
    for name, content in files.items():
        assert str(run.parent).encode() not in content, f"{name} tells a place on this machine"
    assert json.loads(files["config.json"])["data"] == "data.npz"
    assert set(hub.told_storage) == {None}  # the token is for the Hub, not for its storage


@pytest.mark.slow
def test_the_card_is_one_that_the_hub_reads(hub: Hub, run: Path, address: Address) -> None:
    text = hub.repositories["user/coins"].commits[-1][1]["README.md"].decode()
    data = huggingface_hub.ModelCard(text).data
    scores = json.loads((run / "scores.json").read_text())
    assert data.library_name == "nofuss"
    assert {"metric-learning", "proxy-nca", "safetensors"} <= set(data.tags)
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found["recall@1"] == pytest.approx(scores["recall@1"], abs=1e-6)
    assert {result.dataset_name for result in data.eval_results} == {"data.npz"}
    assert 'nofuss.load("hf://user/coins")' in text.replace("'", '"')


@pytest.mark.slow
def test_loaded_is_what_was_pushed_also_without_a_network(
    hub: Hub, run: Path, address: Address, tmp_path: Path
) -> None:
    expected = nofuss.load(run).embed(np.eye(16, dtype=np.float32)).tolist()
    before, env = len(hub.requests), environment(hub, tmp_path)
    found = driven(
        env,
        "hf://user/coins",
        embedding("hf://user/hidden"),
        embedding("hf://user/coins@v9"),
        ["push", str(run), "user/other"],
        ["push", str(run), "user/other", "--message", "x" * 10],
        [
            "embed",
            "hf://user/coins",
            str(run.parent / "data.npz"),
            "--out",
            str(tmp_path / "v.npz"),
        ],
    )
    assert found[0] == (str(address), expected)
    assert found.pop()[0] == 0
    assert np.load(tmp_path / "v.npz")["vectors"].shape == (72, 8)
    wanted = [line for line in hub.requests[before:] if "README" in line or "config.json" in line]
    assert wanted == []  # nothing but the model is fetched
    for code, said in found[1:]:
        assert code == 1
        lines = [line for line in said.splitlines() if line != "starting …"]  # a slow machine
        assert len(lines) == 1, said
    cures = ["hf auth login", "revision", "hf auth login", "hf auth login"]
    assert all(cure in said for cure, (_, said) in zip(cures, found[1:], strict=True))
    # Nobody answers on port 1: the cache has it, by name and by commit, and nothing else.
    unreachable = env | {"HF_ENDPOINT": "http://127.0.0.1:1"}
    found = driven(unreachable, "hf://user/coins", str(address), embedding("hf://user/hidden"))
    assert found[:2] == [(str(address), expected)] * 2
    assert found[2][0] == 1
    assert "http://127.0.0.1:1" in found[2][1]


@pytest.mark.slow
def test_what_does_not_fit_its_checksums_is_refused(
    hub: Hub, address: Address, tmp_path: Path
) -> None:
    repository = hub.repositories["user/coins"]
    old = repository.commits[-1][1]
    newer = repository.add({"model/model.json": old["model/model.json"].replace(b"8", b"9")})
    damages, env = [b"!"], environment(hub, tmp_path)
    hub.in_transit = lambda content: content[:-1] + damages.pop() if damages else content
    try:
        found = driven(env, embedding(address), embedding(address))
        for code, said in found:  # damaged on the way; then from the cache
            assert code == 1
            assert "is damaged" in said
        words = found[0][1].split()
        shutil.rmtree(words[words.index("delete") + 1])
        (source, _), (code, said) = driven(env, str(address), embedding("hf://user/coins"))
    finally:
        hub.in_transit = bytes
        assert repository.commits.pop()[0] == newer
    assert source == str(address)  # still the commit that was asked for
    assert code == 1  # the newest commit does not fit its checksum
    assert "model/model.json is damaged" in said


@pytest.mark.slow
def test_nothing_is_pushed_of_a_damaged_model(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    weights = model_files(damaged / "model")[1]
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(RunError, match="damaged"):
        push(damaged, "user/damaged")
    assert "user/damaged" not in hub.repositories


def test_what_was_taught_is_pushed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = Path(shutil.copytree(run, tmp_path / "run"))
    encoder = nofuss.load(taught, feedback=False)
    manifest = read_manifest(taught / "index", encoder.digest) or Manifest(encoder.digest)
    matrix = torch.diag(torch.linspace(0.1, 2, encoder.dim, dtype=torch.float64))
    write_manifest(taught / "index", manifest, {"map": tensor_bytes({"map": matrix})})

    def upload(files: dict[str, Any], name: str, **_: Any) -> Address:
        for file, content in files.items():
            path = tmp_path / "pushed" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        return Address(name)

    monkeypatch.setattr("nofuss.model.hub.upload", upload)
    push(taught, "user/taught")
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    pushed, used = nofuss.load(tmp_path / "pushed" / "model").embed(x), nofuss.load(taught).embed(x)
    assert torch.equal(pushed, used)
    assert not torch.allclose(pushed, encoder.embed(x), atol=0.01)


def test_a_revision_to_push_to_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match="user/name@v1 names a revision"):
        push(run, "user/name@v1")


@pytest.mark.parametrize(
    "path",
    [
        "hf://user",
        "hf://user/name/more",
        "hf://u/n@",
        "hf://u/../n",
        "hf://u/n@../x",
        "hf://u/n@a b",
        *(f"hf://{name}" for name in ("/b", "a/", "a b/c", "-a/b", "a/b--c", "a/b\n")),
    ],
)
def test_addresses_that_are_none(path: str) -> None:
    with pytest.raises(UsageError, match="expected hf://user/name"):
        parse_address(path)


def test_addresses_survive_being_a_path() -> None:
    expected = Address("user/a.b_c-d", "v1.0")
    for path in ("hf://user/a.b_c-d@v1.0", Path("hf://user/a.b_c-d@v1.0"), str(expected)):
        assert parse_address(path) == expected


def test_commands_lose_their_places() -> None:
    command = "nofuss train '/some/where/my photos' --out runs/x --dim 64"
    assert without_places(command) == "nofuss train 'my photos' --out x --dim 64"
    assert without_places("unbalanced 'quote") == "unknown"


@pytest.mark.slow
def test_without_the_package_one_line_says_so(run: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'nofuss\[hub\]'"):
        nofuss.load("hf://user/name")


def test_no_path_of_this_machine_is_published(tmp_path: Path) -> None:
    places = ("data", "weights", "corrections", "out", "tensorboard")
    settings = replace(settings_of(), **dict.fromkeys(places, tmp_path / "file.csv"))
    assert str(tmp_path) not in json.dumps(public_config(settings))
