"""A real `nofuss serve` to attack, and an honest client that must be served meanwhile."""

import http.client
import io
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from PIL import Image

from torture.measured import run_measured
from torture.training import FLAGS, command, environment, write_pictures

HONEST_SECONDS = 10.0
"""How long an honest client waits, whatever others do."""


@dataclass
class Served:
    """A server, its address, and its output."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int
    token: str
    run: Path
    held: list[socket.socket] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The output since it printed its address."""
        return self.log.read_text(errors="backslashreplace").split("stop with Ctrl-C\n")[-1]

    def head(self, method: str = "GET", path: str = "/api/about", more: str = "") -> bytes:
        """Return the head of a request with the token."""
        lines = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        return f"{lines}Cookie: nofuss-{self.port}={self.token}\r\n{more}\r\n".encode()

    def connect(self) -> socket.socket:
        """Open a connection that stays until the attack is over."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=HONEST_SECONDS)
        self.held.append(line)
        return line

    def send(self, content: bytes) -> socket.socket:
        """Send bytes over a new connection; the server may close it meanwhile."""
        line = self.connect()
        with suppress(OSError):
            line.sendall(content)
        return line

    @cached_property
    def keys(self) -> list[str]:
        """Keys of some items."""
        return [item["key"] for item in json.loads(self.ask("/api/some")[1])["results"]]

    def disconnect(self) -> None:
        """Close all connections."""
        for line in self.held:
            line.close()
        self.held.clear()

    def ask(
        self, path: str, body: bytes | None = None, cookie: str = "", kind: str = ""
    ) -> tuple[int, bytes]:
        """Send an honest request; return status and body. kind: the type of the body."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HONEST_SECONDS)
        headers = {"Cookie": f"{cookie}nofuss-{self.port}={self.token}"}
        headers |= {"Content-Type": kind} if kind else {}
        try:
            line.request("GET" if body is None else "POST", path, body, headers)
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    def megabytes(self) -> float:
        """Return the peak memory so far of the server or any of its processes."""
        peaks = []
        for pid in (self.process.pid, *children(self.process.pid)):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                peaks += [int(n) / 1024 for n in re.findall(r"VmHWM:\s*(\d+) kB", status)]
        return max(peaks, default=0.0)


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return []


@contextmanager
def served(home: Path, run: Path) -> Iterator[Served]:
    """Run `nofuss serve` on a free port; kill it at the end if it still runs."""
    log = home / f"server-{time.monotonic_ns()}.txt"

    with log.open("wb") as out:
        process = subprocess.Popen(
            command("serve", run, "--port", "0"),
            env={**environment(home), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    server = None
    try:
        while "stop with Ctrl-C\n" not in (said := log.read_text()):
            assert process.poll() is None, said
            time.sleep(0.05)
        found = re.search(r":(\d+)/\?token=(\S+)", said)
        assert found, said
        server = Served(process, log, int(found[1]), found[2], run)
        yield server
    finally:
        process.kill()
        process.wait()
        if server is not None:
            server.disconnect()


def honest(server: Served) -> list[str]:
    """Return the complaints of an honest client."""
    complaints = []
    for what, path, body in (
        ("the page", "/", None),
        ("a picture", "/pictures/{}", None),
        ("a search", "/api/search?item={}", None),
        ("an upload", "/api/search", HONEST),
    ):
        began = time.monotonic()
        try:
            status, content = server.ask(path.format(server.keys[0]), body)
            if status != 200:
                complaints.append(f"{what} got {status} {content[:80]!r}")
        except (OSError, http.client.HTTPException) as error:
            waited = time.monotonic() - began
            complaints.append(f"{what} got {type(error).__name__} after {waited:.1f} s")
    return complaints


def _honest_picture() -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (64, 48), "teal").save(file, "PNG")
        return file.getvalue()


HONEST = _honest_picture()


def prepare_run(home: Path) -> Path:
    """Make a run of pictures with an index of them."""
    data, run = write_pictures(home / "data"), home / "run"
    for words in (("train", data, "--out", run, *FLAGS, "--epochs", "1"), ("index", run)):
        ended = run_measured(home, *words)
        assert ended.code == 0, ended.said
    return run
