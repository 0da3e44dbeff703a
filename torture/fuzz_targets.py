"""What is fuzzed: files of a run, requests to the page, filters."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import torch

import nofuss
from nofuss.config import Options
from nofuss.data.columns import Type
from nofuss.errors import DataError, NofussError, RunError
from nofuss.model.saved import model_digest
from nofuss.report.card import write_card
from nofuss.run.directory import Run
from nofuss.run.proxies import load_proxies
from nofuss.search import Index
from nofuss.search.filter import FilterError, as_mask, as_sql, encode, parse_filter
from nofuss.search.open import open_search
from nofuss.search.update import update_index
from nofuss.training.checkpoint import load_checkpoint
from nofuss.training.train import run_training
from torture.fuzz import Target
from torture.page import HONEST, Served, honest, prepare_run, served
from torture.runs import reseal

# Files of a run

DIM = 8


def runs(home: Path) -> Target:
    """Open a run, embed and search with one file changed; the first byte says which."""
    random, labels = np.random.default_rng(0), np.repeat(np.arange(12), 6)
    vectors = random.normal(size=(12, 16))[labels] + 0.3 * random.normal(size=(72, 16))
    np.savez(home / "data.npz", vectors=vectors.astype(np.float32), labels=labels)
    asked = Options(data=home / "data.npz", out=home / "run", epochs=2, dim=DIM, test_fraction=0.5)
    whole = run_training(asked)
    update_index(whole, None)
    index = Index.load(whole / "index").with_map(torch.eye(DIM) + 0.1)
    index.commit(index.about)
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
        lambda: open_search(Run.open(run)).index.search(nofuss.load(run).embed(vectors), 3),
        lambda: load_proxies(run, model_digest(run / "model"), DIM),
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
    *("GET /", "GET /api/about", "GET /api/items/KEY", "GET /api/some?class=class", "GET /api/map"),
    *("GET /api/search?item=KEY&k=3", "GET /pictures/KEY"),
    *("GET /api/feedback.csv", "GET /api/labels"),
    "GET /api/search?item=KEY&where=label%20!%3D%20%27x%27",
)
BODIES = {
    "/api/search": HONEST,
    "/api/feedback": b'{"query": {"item": "KEY"}, "said": [{"item": "KEY", "same": true}]}',
    "/api/learn": b"{}",
    "/api/undo": b"{}",
    "/api/labels": b'{"item": "KEY", "label": "class 1"}',
}
_running: list[object] = []
SLOWEST, ENOUGH = 20.0, 0.3
"""Seconds in which a connection must be accepted, and after which no answer is waited for."""


def requests(home: Path) -> Target:
    """Send changed requests to a real server; it must answer or close, and print nothing."""
    context = served(home, prepare_run(home))
    server = context.__enter__()
    _running.append(context)  # or it ends here
    watch = f"while kill -0 {os.getpid()}; do sleep 1; done; kill {server.process.pid}"
    nothing = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", watch], stdin=nothing, stderr=nothing)  # this one is killed
    key = server.keys[0]
    seeds = [server.head(*route.replace("KEY", key).split(" ")) for route in ROUTES]
    for path, body in BODIES.items():
        filled = body.replace(b"KEY", key.encode())
        kind = "" if body == HONEST else "Content-Type: application/json\r\n"
        length = f"{kind}Content-Length: {len(filled)}\r\n"
        seeds.append(server.head("POST", path, length) + filled)
    count = 0

    def read(content: bytes) -> None:
        nonlocal count
        count += 1
        status = _answered(server, content)
        if server.said or server.process.poll() is not None:
            raise AssertionError(f"the server said {server.said[-500:]!r}")
        if count % 500 == 0 and (complaints := honest(server)):
            raise AssertionError(f"an honest client: {complaints}")
        if server.megabytes() > 1200:
            raise AssertionError(f"{server.megabytes():.0f} MB")
        if status == 500:
            raise AssertionError("status 500")
        if status not in (0, 200):
            raise RunError(f"status {status}")

    words = "Transfer-Encoding: chunked\r\n|Host: evil\r\n|Origin: null\r\n|%00|%ff|..|//|HEAD|PUT"
    words += (
        "|\r\n\r\n|Expect: 100-continue\r\n|HTTP/1.0|OPTIONS|&k=500|null|[]|{}|NaN|token=|where="
    )
    return Target(seeds, read, [*words.encode().split(b"|"), b"\xff", b"\0"], _repaired_length)


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


# Filters

TYPES: dict[str, Type] = {
    "price": "number",
    "shop": "text",
    "day": "date",
    "sold": "bool",
    "label": "text",
}
SPELLED = {
    "number": ("20", "-1.5e3", "0", "1e308", ".5", "null"),
    "text": ("'north'", "'o\\'neill'", '"%s"', "'\\'", "'\0'", "'★'", "''", "'\"; --'", "null"),
    "date": ("'2024-05-01'", "'2024-05-01 10:00'", "'0001-01-01'", "'2024-13-01'"),
    "bool": ("true", "false", "null"),
}


def filters(home: Path) -> Target:
    """Parse a filter, apply it, and translate it to SQL."""
    columns = {
        "price": encode([1.0, None, 20.0]),
        "shop": encode(["north", "o'neill", None]),
        "day": encode(["2024-05-01T00:00:00", None, "2024-06-01T10:00:00"]),
        "sold": encode([True, False, None]),
        "label": encode(["x", None, "y"]),
    }

    def read(content: bytes) -> None:
        text = content.decode("utf-8", "surrogateescape")
        try:
            where = parse_filter(text, TYPES)
        except FilterError as error:
            raise DataError(str(error).replace("\n", " ")) from None
        as_mask(where, columns.__getitem__)
        sql, values = as_sql(where, TYPES)
        assert sql.count("%s") == len(values)

    seeds = ["price<20 and shop=='north'", "not (day >= '2024-05-01' or sold) and label != 'x'"]
    seeds += ["shop in ('a', 'b\\'c') or price is not null", "`price` == -1.5e3", "30 > price >= 2"]
    words = [*"'\"`(),%;\\\0٣", "==", "<>", "<=", "%s", "--", "1e999", "not ", " and ", " or "]
    words += ["(" * 60, "not " * 60, "'" * 999, "9" * 500, "price", "shop", "label"]
    return Target(
        [seed.encode() for seed in seeds],
        read,
        [word.encode() for word in words],
        lambda draw, text: _filter(draw).encode() if draw.random() < 0.5 else text,
    )


def _filter(draw: Random, depth: int = 0) -> str:
    """Return a random filter that can be read, or nearly."""
    if depth < 5 and draw.random() < 0.6:
        parts = [_filter(draw, depth + 1) for _ in range(draw.randint(1, 4))]
        join = draw.choice((" and ", " or ", " AND "))
        return draw.choice(("({})", "not ({})", "{}")).format(join.join(parts))
    column = draw.choice((*TYPES, "`price`", "PRICE"))
    kind = TYPES.get(column.strip("`").lower(), "text")
    value = draw.choice(SPELLED[kind if draw.random() < 0.9 else draw.choice((*SPELLED,))])
    sign = draw.choice(("==", "=", "!=", "<", "<=", ">", ">="))
    forms = ("{c} {s} {v}", "{v} {s} {c}", "{c} not in ({v}, {v})", "{c} is not null", "{c}")
    return draw.choice(forms).format(c=column, s=sign, v=value)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "runs": runs,
    "requests": requests,
    "filters": filters,
}
