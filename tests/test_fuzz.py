"""Foreign bytes into every parser: an error of our own tree comes out, or an answer.

`make torture` runs these, and their like in tests/data, with many more examples.
"""

import asyncio
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nofuss
from nofuss.errors import NofussError
from nofuss.files import read_json, sha256, write_json
from nofuss.report.card import write_card
from nofuss.run.directory import Run
from nofuss.run.embeddings import _ARRAYS, _checksum, load_embeddings
from nofuss.search.searchable import open_own_index
from nofuss.search.server import build_app
from nofuss.search.shelf import open_shelf
from nofuss.search.update import update_index
from nofuss.training.checkpoint import load_checkpoint
from tests.tiny_run import draw, train_pictures, train_vectors

pytestmark = pytest.mark.fuzz
relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
few = settings(relaxed, max_examples=settings.default.max_examples // 5)
"""Of each of many files."""
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@st.composite
def changed(draw: Callable[..., Any], whole: bytes) -> bytes:
    """Some bytes of a file flipped, cut, doubled or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "all"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[at : at + draw(st.integers(1, 400))]
            case "insert":
                content[at:at] = draw(st.binary(max_size=20))
            case _:
                content = bytearray(draw(st.binary(max_size=50)))
    return bytes(content)


@st.composite
def other_json(draw: Callable[..., Any], whole: Any) -> Any:
    """One value of a JSON document replaced by anything, or taken out."""
    if isinstance(whole, dict) and whole and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(whole)))
        rest = {k: v for k, v in whole.items() if k != key}
        return rest if draw(st.integers(0, 5)) == 0 else rest | {key: draw(other_json(whole[key]))}
    if isinstance(whole, list) and whole and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(whole) - 1))
        return [*whole[:at], draw(other_json(whole[at])), *whole[at + 1 :]]
    return draw(anything)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on vectors, with an index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOFUSS_CACHE", str(tmp_path_factory.mktemp("cache")))
        run = train_vectors(tmp_path_factory.mktemp("vectors"))
        update_index(run, None)
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    return tmp_path / "run"


FILES = (
    "config.json",
    "data.json",
    "environment.json",
    "scores.json",
    "metrics.jsonl",
    "embeddings.safetensors",
    "model/model.json",
    "model/weights",
    "index/manifest.json",
    "index/items",
    "index/vectors",
    "checkpoints/step",
)


def find(run: Path, name: str) -> Path:
    """The file, where its full name depends on content or step."""
    folder, _, part = name.rpartition("/")
    return max((run / folder).glob(f"{part}*"))


def vouch(file: Path) -> None:
    """Mend the checksums, so that what reads the file sees it."""
    if file.parent.name == "model" and file.name != "model.json":
        description = read_json(file.parent / "model.json") | {"weights": sha256(file)}
        write_json(file.parent / "model.json", description)
        file.rename(file.with_name(f"weights-{sha256(file)[:16]}.safetensors"))
    elif file.parent.name == "model":
        with suppress(ValueError, AttributeError, TypeError):  # no object any more
            content = json.loads(file.read_bytes())
            content.pop("checksum", None)
            file.write_text(json.dumps(content))
    elif file.parent.name == "index" and file.name != "manifest.json":
        part = file.name.partition("-")[0]
        manifest = file.parent / "manifest.json"
        content = json.loads(manifest.read_text())
        content["sha256"][part] = sha256(file)
        manifest.write_text(json.dumps(content))
        file.rename(file.with_name(f"{part}-{sha256(file)[:16]}{file.suffix}"))


def read_all(run: Path) -> None:
    """Everything that opens a run; only our errors may come out."""
    vectors = np.eye(16, dtype=np.float32)[:2]
    said: list[str] = []
    for read in (
        lambda: Run.open(run),
        lambda: nofuss.load(run).embed(vectors),
        lambda: load_embeddings(run),
        lambda: open_own_index(Run.open(run), nofuss.load(run)).search(torch.eye(8), 3),
        lambda: load_checkpoint(run / "checkpoints"),
        lambda: write_card(Run.open(run)),
    ):
        try:
            read()
        except NofussError as error:
            said.append(str(error))
    assert all("\n" not in line for line in said)


@contextmanager
def restored(folder: Path) -> Iterator[None]:
    """The files of a folder are afterwards as they were."""
    before = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    try:
        yield
    finally:
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        for path, content in before.items():
            path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:.*is damaged and left out")
@pytest.mark.parametrize("name", FILES)
@few
@given(data=st.data())
def test_changed_files_of_a_run(name: str, run: Path, data: st.DataObject) -> None:
    file = find(run, name)
    with restored(file.parent):
        file.write_bytes(data.draw(changed(file.read_bytes())))
        if data.draw(st.booleans()):
            vouch(file)
        read_all(run)


@pytest.mark.filterwarnings("ignore:.*is damaged and left out")
@pytest.mark.parametrize("name", [n for n in FILES if ".json" in n or "items" in n])
@few
@given(data=st.data())
def test_other_json_in_a_run(name: str, run: Path, data: st.DataObject) -> None:
    """Well-formed and vouched for by its checksum, but not what training wrote."""
    file = find(run, name)
    text = file.read_text()
    content = json.loads(text.splitlines()[0] if "jsonl" in name else text)
    has_checksum = isinstance(content, dict) and content.pop("checksum", None) is not None
    content = data.draw(other_json(content))
    with restored(file.parent):
        if has_checksum and isinstance(content, dict):
            write_json(file, content)
        else:
            file.write_text(json.dumps(content))
            vouch(file)
        read_all(run)


numbers = st.sampled_from([0.0, -1.0, 1e30, 1e-40, math.nan, math.inf])


@st.composite
def other_tensor(draw: Callable[..., Any], whole: torch.Tensor) -> torch.Tensor:
    """Another type, another shape, or some entries that are anything."""
    match draw(st.sampled_from(["type", "cut", "wide", "flat", "more", "entries", "all"])):
        case "type":
            kinds = (torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
            return whole.to(draw(st.sampled_from(kinds)))
        case "cut":
            return whole[: draw(st.integers(0, 2))] if whole.ndim else whole
        case "wide" if whole.ndim > 1:
            return torch.cat([whole, whole], 1)
        case "flat":
            return whole.reshape(-1)
        case "more":
            return whole[None]
        case "all":
            return torch.full_like(whole.float(), draw(numbers))
        case _:
            flat = whole.float().clone().reshape(-1)
            for _ in range(draw(st.integers(1, 3)) if len(flat) else 0):
                flat[draw(st.integers(0, len(flat) - 1))] = draw(numbers)
            return flat.reshape(whole.shape)


@pytest.mark.filterwarnings("ignore:.*is damaged and left out")
@pytest.mark.parametrize(
    "name", [n for n in FILES if "safetensors" in n or n in ("index/vectors", "model/weights")]
)
@few
@given(data=st.data())
def test_other_tensors_in_a_run(name: str, run: Path, data: st.DataObject) -> None:
    """As safetensors writes them and vouched for, but not what training wrote."""
    file = find(run, name)
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    key = data.draw(st.sampled_from(sorted(tensors)))
    other = data.draw(st.none() | other_tensor(tensors[key]))
    changed = {k: t.clone() for k, t in tensors.items() if k != key}
    if other is not None:
        changed[key] = other.clone().contiguous()
    with restored(file.parent):
        save_file(changed, file, metadata=metadata)
        if name == "embeddings.safetensors":
            vouch_for_embeddings(file, changed)
        else:
            vouch(file)
        read_all(run)


def vouch_for_embeddings(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write it anew with a checksum that fits."""
    with safe_open(file, framework="pt") as stored:
        about = json.loads(stored.metadata()["about"])
    about.pop("checksum")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if set(arrays) == set(_ARRAYS):
        about["checksum"] = _checksum(about, arrays)
        save_file(tensors, file, metadata={"about": json.dumps(about)})


# Uploads


class Client:
    """Requests straight into the application, in this process: what it raises is seen here."""

    def __init__(self, run: Path) -> None:
        self.runner = asyncio.Runner()
        self.page = build_app(open_shelf(run), host="127.0.0.1", port=80, token=None)
        self.app = self.page.app

    def __call__(
        self,
        method: str,
        path: str,
        query: bytes = b"",
        body: bytes = b"",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> int:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": headers or [],
            "scheme": "http",
            "server": ("127.0.0.1", 80),
        }
        statuses: list[int] = []
        bodies = [body]

        async def receive() -> dict[str, Any]:
            if not bodies:  # the client stays to read the answer
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        self.runner.run(self.app(scope, receive, send))  # type: ignore[arg-type]
        return statuses[0]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOFUSS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return Client(train_pictures(tmp_path_factory.mktemp("pictures")))


def picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    draw(1, 1).save(buffer, kind)
    return buffer.getvalue()


PICTURES = {kind: picture(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")}


@relaxed
@given(data=st.data())
def test_uploads(client: Client, data: st.DataObject) -> None:
    body = data.draw(
        st.binary(max_size=200)
        | st.sampled_from(list(PICTURES.values())).flatmap(lambda whole: changed(whole))
    )
    assert client("POST", "/api/search", body=body) in (200, 400, 415, 422)


@relaxed
@given(
    st.sampled_from(["/api/search", "/api/about", "/"]) | st.text(max_size=20).map("/{}".format),
    st.sampled_from(["/api/items/{}", "/pictures/{}", "{}"]),
    st.binary(max_size=40) | st.sampled_from([b"k=5", b"item=1", b"k=0", b"class=plain&item=0"]),
    st.lists(st.tuples(st.sampled_from([b"content-length", b"cookie"]), st.binary(max_size=20))),
    st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
)
def test_requests(
    client: Client,
    path: str,
    frame: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    method: str,
) -> None:
    status = client(method, frame.format(path), query, b"", headers)
    assert status in (200, 400, 404, 405, 413)
