"""Runs of strangers on the page: feedback and maps that are links, pipes or nonsense.

Every case gets a copy of a run that was taught something. The server must refuse it in one line, or
start, answer every request soon and print nothing; no file outside the run may change.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nofuss.search.feedback import FILE
from nofuss.search.folder import FolderIndex
from torture.attack_runs import contents, file_link, sparse
from torture.measured import Case
from torture.served import Served, prepare_run, served

Forge = Callable[[Path, Path], None]
SLOWEST = 20.0
"""Seconds for an answer: learning takes some of them on a busy machine."""


def special(name: str, make: Callable[[Path], object]) -> Forge:
    """Put something else in the place of a file."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return forge


def mapped(matrix: torch.Tensor) -> Forge:
    """Replace the map that was learned, and vouch for it."""

    def forge(run: Path, disk: Path) -> None:
        index = FolderIndex.load(run / "index").with_map(matrix)
        index.commit(index.about)

    return forge


def text(name: str, content: bytes) -> Forge:
    """Write a file."""

    def forge(run: Path, disk: Path) -> None:
        (run / name).write_bytes(content)

    return forge


MARK = b'{"query": "%s", "item": "\\u001b[31m", "same": %s}\n'
LABEL = b'{"item": "%s", "label": "x", "corrected": %s}\n'
FORGERIES: dict[str, Forge] = {
    "feedback is a link": file_link(FILE),
    "feedback is a pipe": special(FILE, os.mkfifo),
    "feedback is a terabyte": special(FILE, sparse),
    "a map of zeros": mapped(torch.zeros(4, 4).double()),
    "a map of another width": mapped(torch.eye(9).double()),
    "a map of NaN": mapped(torch.full((4, 4), torch.nan).double()),
    "feedback of nonsense": text(FILE, MARK % (b"x", b"7") + b"[" * 10**5 + b"\n\xff\n"),
    "feedback of nobody": text(FILE, b"".join(MARK % (b"%d" % i, b"true") for i in range(9))),
    "labels of nonsense": text(
        FILE, LABEL % (b"\\ud800", b'"\\u001b[31m"') + LABEL % (b"x", b"[]")
    ),
}


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Serve every forgery."""
    run = prepare_run(home)
    with served(home, run) as server:  # teach it something
        keys = server.keys
        said = {"query": {"item": keys[0]}, "said": [{"item": keys[1], "same": True}]}
        for path, body in (("feedback", said), ("learn", {})):
            status, answer = post(server, path, body)
            assert status == 200, answer
    run.rename(home / "whole")
    for name, forge in FORGERIES.items():
        yield _served(home, run, name, forge, keys)


def post(server: Served, path: str, body: object) -> tuple[int, bytes]:
    """Send an honest object; return status and answer."""
    return server.ask(f"/api/{path}", json.dumps(body).encode(), kind="application/json")


def _served(home: Path, run: Path, name: str, forge: Forge, keys: list[str]) -> Case:
    disk, began = home / "disk", time.monotonic()
    for folder in (run, disk):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "whole", run)
    disk.mkdir()
    (disk / "precious").write_text("precious")
    forge(run, disk)
    before = contents(disk)
    said = {"query": {"item": keys[0]}, "said": [{"item": keys[1], "same": False}]}
    complaints, refused, megabytes = list[str](), False, 0.0
    try:
        with served(home, run) as server:
            for path, body in (
                (f"search?item={keys[0]}", None),
                ("feedback.csv", None),
                ("feedback", said),
                ("labels", None),
                ("labels", {"item": keys[0], "label": "class 0"}),
                ("undo", {}),
                ("learn", {}),
            ):
                started = time.monotonic()
                if body is None:
                    status, _ = server.ask(f"/api/{path}")
                else:
                    status, _ = post(server, path, body)
                seconds = time.monotonic() - started
                refused |= status != 200
                if (status >= 500 and status != 507) or seconds > SLOWEST:
                    complaints.append(f"{path}: {status} after {seconds:.1f} s")
            megabytes = server.megabytes()
            if server.said:
                complaints.append(f"said {server.said[-300:]!r}")
    except AssertionError as error:  # it did not start
        line, refused = str(error).strip().splitlines()[-1], True
        if not line.startswith("nofuss: ") or "(unexpected" in line:
            complaints.append(f"did not start: {str(error)[-300:]!r}")
    if contents(disk) != before:
        complaints.append("a file outside was changed")
    return Case(name, refused, time.monotonic() - began, megabytes, complaints)
