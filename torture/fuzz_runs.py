"""Everything that opens a run, on runs with one changed file; and requests to a running server."""

import json
import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import torch

import nofuss
from nofuss.config import Options
from nofuss.errors import NofussError, RunError
from nofuss.model.saved import model_digest
from nofuss.report.card import write_card
from nofuss.run.directory import Run
from nofuss.run.proxies import load_proxies
from nofuss.search.folder import FolderIndex
from nofuss.search.update import update_index
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.train import run_training
from torture.forgeries import reseal
from torture.fuzz import Target
from torture.served import HONEST, Served, honest, prepare_run, served

DIM = 8


def _trained(home: Path) -> Path:
    """Train on vectors, make an index, and teach it something."""
    random, labels = np.random.default_rng(0), np.repeat(np.arange(12), 6)
    vectors = random.normal(size=(12, 16))[labels] + 0.3 * random.normal(size=(72, 16))
    np.savez(home / "data.npz", vectors=vectors.astype(np.float32), labels=labels)
    data, out = home / "data.npz", home / "run"
    run = run_training(Options(data=data, out=out, epochs=2, dim=DIM, test_fraction=0.5))
    update_index(run, None)
    turned = torch.eye(DIM).double() + 0.1 * torch.ones(DIM, DIM).double()
    index = FolderIndex.load(run / "index").with_map(turned)
    index.commit(index.about)
    return run


def runs(home: Path) -> Target:
    """Open a run, embed, search, resume; its first byte says which file."""
    whole = _trained(home)
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    files = [f for f in files if f.suffix in (".json", ".jsonl", ".safetensors")]
    contents = [(whole / file).read_bytes() for file in files]

    def read(content: bytes) -> None:
        if not content:
            return
        shutil.rmtree(home / "copy", ignore_errors=True)
        shutil.copytree(whole, home / "copy")
        number, is_sealed = content[0] % 128 % len(files), content[0] < 128
        (home / "copy" / files[number]).write_bytes(content[1:])
        if is_sealed:
            with suppress(KeyError, TypeError, ValueError, OSError):  # a manifest that is damaged
                reseal(home / "copy" / files[number])
        read_all(home / "copy")

    words = (b"NaN", b"1e999", b"null", b"[]", b"{}", b"../", b'"\\u001b[31m"', b"F64", b"I64")
    return Target([bytes([i]) + content for i, content in enumerate(contents)], read, words)


def read_all(run: Path) -> None:
    """Do everything that opens a run; only errors of ours may come out, the first one does."""
    vectors = np.eye(16, dtype=np.float32)[:2]
    refusals: list[NofussError] = []
    for read in (
        lambda: Run.open(run),
        lambda: nofuss.load(run).embed(vectors),
        lambda: load_proxies(run, model_digest(run / "model"), DIM),
        lambda: FolderIndex.load(run / "index").search(torch.eye(DIM), 3),
        lambda: load_checkpoint(run / "checkpoints"),
        lambda: write_card(Run.open(run)),
    ):
        try:
            read()
        except NofussError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


# Requests

ROUTES = (
    *(
        "GET /",
        "GET /search.js",
        "GET /api/about",
        "GET /api/items/KEY",
        "GET /api/some?class=class",
    ),
    *("GET /api/search?item=KEY&k=3", "GET /api/search?vector=VECTOR"),
    *("GET /api/map", "GET /api/feedback.csv", "GET /api/labels"),
    *("GET /pictures/KEY", "GET /api/search?item=KEY&where=label%20!%3D%20%27x%27"),
)
BODIES = {
    "/api/search": HONEST,
    "/api/feedback": b'{"query": {"item": "KEY"}, "said": [{"item": "OTHER", "same": true}]}',
    "/api/learn": b"{}",
    "/api/undo": b"{}",
    "/api/labels": b'{"item": "KEY", "label": "class 1"}',
}
_running: list[object] = []
SLOWEST, ENOUGH = 20.0, 0.3
"""Seconds in which a connection must be accepted, and after which no answer is waited for."""


def requests(home: Path) -> Target:
    """Send changed requests to a real server; it must answer or close, and print nothing."""
    run = prepare_run(home)
    context = served(home, run)
    server = context.__enter__()
    _running.append(context)  # or it ends here
    watch = f"while kill -0 {os.getpid()}; do sleep 1; done; kill {server.process.pid}"
    nothing = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", watch], stdin=nothing, stderr=nothing)  # this one is killed
    key, other = server.keys[:2]
    vector = json.loads(server.ask("/api/search", HONEST)[1])["query"]["vector"]
    names = {b"KEY": key.encode(), b"OTHER": other.encode(), b"VECTOR": vector.encode()}
    seeds = []
    for route in ROUTES:
        method, path = route.split(" ")
        seeds.append(server.head(method, path))
    for path, body in BODIES.items():
        length = len(_filled(body, names))
        kind = "" if path == "/api/search" else "Content-Type: application/json\r\n"
        seeds.append(server.head("POST", path, f"{kind}Content-Length: {length}\r\n") + body)
    seeds = [_filled(seed, names) for seed in seeds]
    count = 0

    def read(content: bytes) -> None:
        nonlocal count
        count += 1
        status = _answered(server, content)
        said, alive = server.said, server.process.poll() is None
        if said or not alive:
            raise AssertionError(f"the server said {said[-500:]!r}, alive: {alive}")
        if count % 500 == 0 and (complaints := honest(server)):
            raise AssertionError(f"an honest client: {complaints}")
        if server.megabytes() > 1200:
            raise AssertionError(f"{server.megabytes():.0f} MB")
        if status == 500:
            raise AssertionError("status 500")
        if status not in (0, 200):
            raise RunError(f"status {status}")

    words: tuple[bytes, ...] = (b"\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n")
    words += (
        b"Transfer-Encoding: chunked\r\n",
        b"Host: evil\r\n",
        b"Origin: null\r\n",
        b"%00",
        b"%ff",
        b"..",
        b"//",
        b"HEAD",
        b"PUT",
    )
    words += (b"Expect: 100-continue\r\n", b"HTTP/1.0", b"HTTP/2.0", b"OPTIONS", b"\xff", b"&k=500")
    words += (b"null", b"[]", b"{}", b"NaN", b"true", b"Cookie: ", b"\0", b"token=", b"where=")
    return Target(seeds, read, words, _repaired_length)


def _filled(content: bytes, names: dict[bytes, bytes]) -> bytes:
    for name, value in names.items():
        content = content.replace(name, value)
    return content


def _answered(server: Served, content: bytes) -> int:
    """Send bytes and return the status of the answer; 0 if none comes soon."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SLOWEST) as line:
        try:
            line.sendall(content)
            line.settimeout(ENOUGH)  # the server may wait for more of the request
            answer = line.recv(2**16)
        except (ConnectionError, TimeoutError):
            return 0
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else 0


def _repaired_length(draw: Random, content: bytes) -> bytes:
    """Correct the announced length of the body, most of the time."""
    head, blank, body = content.partition(b"\r\n\r\n")
    if not body or draw.random() < 0.2:
        return content
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + blank + body
