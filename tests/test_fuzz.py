"""Foreign bytes into a run and to the page: an error of our own tree comes out, or an answer.

`make torture` fuzzes them, and filters, for minutes.
"""

import asyncio
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import nofuss
from nofuss.errors import NofussError
from nofuss.model.saved import model_digest
from nofuss.report.card import write_card
from nofuss.run.directory import Run
from nofuss.run.proxies import load_proxies
from nofuss.search.page.server import build_app
from nofuss.search.page.state import open_state
from nofuss.search.search import open_search
from nofuss.search.update import update_index
from nofuss.training.checkpoint import load_checkpoint
from tests.tiny_run import draw
from torture.runs import reseal

pytestmark = pytest.mark.fuzz
relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
numbers = st.sampled_from([0.0, -1.0, 1e30, 1e-40, math.nan, math.inf])

# Files of a run


@st.composite
def changed(draw: Callable[..., Any], whole: bytes) -> bytes:
    """Some bytes of a file flipped, cut or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[at : at + draw(st.integers(1, 400))]
            case _:
                content[at:at] = draw(st.binary(max_size=20))
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


@st.composite
def other_tensor(draw: Callable[..., Any], whole: torch.Tensor) -> torch.Tensor:
    """Another type, another shape, or entries that are anything."""
    kinds = (torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    match draw(st.sampled_from(["type", "cut", "flat", "more", "all"])):
        case "type":
            return whole.to(draw(st.sampled_from(kinds)))
        case "cut":
            return whole[: draw(st.integers(0, 2))] if whole.ndim else whole
        case "flat":
            return whole.reshape(-1)
        case "more":
            return whole[None]
        case _:
            return torch.full_like(whole.float(), draw(numbers))


def change(file: Path, data: st.DataObject) -> None:
    """Change bytes, a value of JSON or a tensor, as this kind of file allows."""
    if file.suffix == ".json" and data.draw(st.booleans()):
        content = json.loads(file.read_bytes())
        content.pop("checksum", None) if isinstance(content, dict) else None
        file.write_text(json.dumps(data.draw(other_json(content))))
    elif file.suffix == ".safetensors" and data.draw(st.booleans()):
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensors[name] = data.draw(other_tensor(tensors[name])).clone().contiguous()
        save_file(tensors, file, metadata=metadata)
    else:
        file.write_bytes(data.draw(changed(file.read_bytes())))


def read_all(run: Path) -> None:
    """Everything that opens a run; only our errors may come out, each of one line."""
    vectors, refusals = np.eye(16, dtype=np.float32)[:2], list[str]()
    for read in (
        lambda: Run.open(run),
        lambda: nofuss.load(run).embed(vectors),
        lambda: load_proxies(run, model_digest(run / "model"), 8),
        lambda: open_search(Run.open(run)).index.search(torch.eye(8), 3),
        lambda: load_checkpoint(run / "checkpoints"),
        lambda: write_card(Run.open(run)),
    ):
        try:
            read()
        except NofussError as error:
            refusals.append(str(error))
    assert not [line for line in refusals if "\n" in line]


@pytest.fixture(scope="module")
def whole(vector_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on vectors, with an index."""
    run = Path(shutil.copytree(vector_run, tmp_path_factory.mktemp("whole") / "run"))
    update_index(run, None)
    return run


@pytest.mark.filterwarnings("ignore:.*is damaged")
@settings(relaxed, max_examples=5 * settings.default.max_examples)
@given(data=st.data())
def test_changed_files_of_a_run(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    files = sorted(p for p in run.rglob("*.*") if p.is_file() and p.name != "report.html")
    file = data.draw(st.sampled_from(files))
    change(file, data)
    if data.draw(st.booleans()):
        with suppress(SafetensorError):
            reseal(file)
    read_all(run)


# Requests


class Client:
    """Requests straight into the application, in this process: what it raises is seen here."""

    def __init__(self, run: Path) -> None:
        self.runner = asyncio.Runner()
        self.page = build_app(open_state(Run.open(run)), host="127.0.0.1", port=80, token=None)
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
def client(picture_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(Path(shutil.copytree(picture_run, tmp_path_factory.mktemp("page") / "run")))
    with made.runner:
        yield made


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
    st.sampled_from(["/pictures/{}", "{}"]),
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
