"""Attacks on `nofuss serve`: connections, requests, bodies and files that are meant to hold it up.

Each attack is given a server at work and yields what can be said against it. Between attacks an
honest client has to be served as before, and the server may not have said anything.
"""

import http.client
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from torture.measured import Case, run_measured
from torture.picture_files import jpeg, with_scans
from torture.training import FLAGS, command, environment, write_pictures

HONEST_SECONDS = 10.0
"""An honest client waits no longer than this, whatever others do."""
STOP_SECONDS = 4.0
"""Ctrl-C has to end it in two; the rest is for a machine that does other things too."""
MEGABYTES = 300.0
"""That one picture may take, above an idle process."""


@dataclass
class Served:
    """A server, how to reach it, and what it says."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int
    token: str
    run: Path
    held: list[socket.socket] = field(default_factory=list)

    @property
    def said(self) -> str:
        """All it has said since it printed its address."""
        return self.log.read_text(errors="backslashreplace").split("stop with Ctrl-C\n")[-1]

    def head(self, method: str = "GET", path: str = "/api/about", more: str = "") -> bytes:
        """The head of a request that is let in."""
        lines = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        return f"{lines}Cookie: nofuss-{self.port}={self.token}\r\n{more}\r\n".encode()

    def connect(self) -> socket.socket:
        """A connection that stays until the attack is over."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=HONEST_SECONDS)
        self.held.append(line)
        return line

    def send(self, content: bytes) -> socket.socket:
        """These bytes over a connection of their own; the server may hang up meanwhile."""
        line = self.connect()
        with suppress(OSError):
            line.sendall(content)
        return line

    def hang_up(self) -> None:
        """End all connections."""
        for line in self.held:
            line.close()
        self.held.clear()

    def ask(self, path: str, body: bytes | None = None, cookie: str = "") -> tuple[int, bytes]:
        """An honest request."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HONEST_SECONDS)
        headers = {"Cookie": f"{cookie}nofuss-{self.port}={self.token}"}
        try:
            line.request("GET" if body is None else "POST", path, body, headers)
            answer = line.getresponse()
            return answer.status, answer.read()
        finally:
            line.close()

    def megabytes(self) -> float:
        """The most that the server, or any of its processes, has held so far."""
        peaks = []
        for pid in (self.process.pid, *children(self.process.pid)):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                peaks += [int(n) / 1024 for n in re.findall(r"VmHWM:\s*(\d+) kB", status)]
        return max(peaks, default=0.0)


def children(pid: int) -> list[int]:
    """Processes that a process has started, and that still run."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return []


@contextmanager
def served(home: Path, run: Path, *, descriptors: int | None = None) -> Iterator[Served]:
    """`nofuss serve` on a free port, killed at the end if it still runs."""
    log = home / f"server-{time.monotonic_ns()}.txt"

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with log.open("wb") as out:
        process = subprocess.Popen(
            command("serve", run, "--port", "0"),
            env={**environment(home), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=limit,
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
            server.hang_up()


def honest(server: Served) -> list[str]:
    """What an honest client would complain of."""
    complaints = []
    for what, path, body in (
        ("the page", "/", None),
        ("a picture", "/pictures/0", None),
        ("a search", "/api/search?item=0", None),
        ("an upload", "/api/search", HONEST),
    ):
        began = time.monotonic()
        try:
            status, content = server.ask(path, body)
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
SLOW = with_scans(jpeg(2_400, 2_400, "L", progressive=True), 250)
"""Within the limits, and some seconds of work."""
COOKIES = ('a_prefs={"theme":"dark"}', "a=b=c", '"', "x=é", "a b=c d", "=", "a=,;", "nofuss-1=x")
GARBAGE = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a terminal's colours": b"GET /\x1b[31mred HTTP/1.1\r\nHost: \x1b]0;x\x07\r\n\r\n",
    "a head without end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
    "a long line": b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "broken chunks": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "another protocol": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "bytes that are no text": b"GET /%ff%fe?\xff\xfe=\xff HTTP/1.1\r\nHost: \xff\r\n\r\n",
}


def silent(server: Served) -> list[str]:
    """Say nothing, 250 times."""
    for _ in range(250):
        line = socket.socket()
        line.setblocking(False)  # a full queue is the attacker's trouble
        line.connect_ex(("127.0.0.1", server.port))
        server.held.append(line)
        time.sleep(0.002)
    return honest(server)


def half_heads(server: Served) -> list[str]:
    """Begin a request, 250 times."""
    for _ in range(250):
        server.send(b"GET / HTTP/1.1\r\nHost: ")
    return honest(server)


def half_bodies(server: Served) -> list[str]:
    """Announce a picture and do not send it."""
    for _ in range(40):
        server.send(server.head("POST", "/api/search", "Content-Length: 100000\r\n") + b"x")
    time.sleep(6)
    return honest(server)


def never_reading(server: Served) -> list[str]:
    """Ask and do not take the answers."""
    for _ in range(60):
        server.send(server.head(path="/page.js") * 50)
    return honest(server)


def slow_pictures(server: Served) -> list[str]:
    """Send work for seconds and leave: nobody may go on with it."""
    length = f"Content-Length: {len(SLOW)}\r\n"
    for _ in range(12):
        line = server.send(server.head("POST", "/api/search", length) + SLOW)
        time.sleep(0.1)
        line.close()
    complaints = honest(server)
    time.sleep(1)
    busy = _processor_seconds(server)
    time.sleep(1)
    if _processor_seconds(server) - busy > 0.5:
        complaints.append("still decodes for a sender who left")
    return complaints


def _processor_seconds(server: Served) -> float:
    spent = 0.0
    for pid in children(server.process.pid):
        with suppress(OSError):
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def garbage(server: Served) -> list[str]:
    """What is no request, or hardly one."""
    for content in GARBAGE.values():
        for _ in range(5):
            line = server.send(content)
            with suppress(OSError):
                line.settimeout(0.2)
                line.recv(1000)
    return honest(server)


def cookies(server: Served) -> list[str]:
    """Other applications on this host have cookies too."""
    return [
        f"locked out by the cookie {cookie!r}"
        for cookie in COOKIES
        if server.ask("/api/about", cookie=f"{cookie}; ")[0] != 200
    ]


def no_files(server: Served) -> list[str]:
    """Items whose files have become pipes, devices, sockets and holes of terabytes."""
    items = json.loads(server.ask("/api/map")[1])["rows"]
    names = [json.loads(server.ask(f"/api/items/{row}")[1])["name"] for row in items]
    data = server.run.parent / "data"
    complaints, taken = [], list[tuple[Path, Path]]()
    with ExitStack() as stack:
        for row, (kind, make) in enumerate(NO_FILES.items()):
            path = data / names[row]
            path.rename(path.with_suffix(".kept"))
            taken.append((path, path.with_suffix(".kept")))
            make(path, stack)
            began = time.monotonic()
            status, _ = server.ask(f"/pictures/{row}")
            if status != 404 or time.monotonic() - began > 7:
                complaints.append(f"{kind}: {status} after {time.monotonic() - began:.1f} s")
    for path, kept in taken:
        path.unlink()
        kept.rename(path)
    return complaints + honest(server)


def _socket(path: Path, stack: ExitStack) -> None:
    line = stack.enter_context(socket.socket(socket.AF_UNIX))
    descriptor = os.open(path.parent, os.O_RDONLY)
    line.bind(f"/proc/self/fd/{descriptor}/{path.name}")  # the whole path may be too long
    os.close(descriptor)


def _sparse(path: Path, stack: ExitStack) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, Callable[[Path, ExitStack], None]] = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to a terminal": lambda path, _: path.symlink_to("/dev/tty"),
    "a file of /proc": lambda path, _: path.symlink_to("/proc/self/maps"),
    "a file of /proc that waits": lambda path, _: path.symlink_to("/proc/kmsg"),
    "a socket": _socket,
    "a terabyte of nothing": _sparse,
    "a folder": lambda path, _: path.symlink_to("/proc"),
}

Attack = Callable[[Served], list[str]]
ATTACKS: dict[str, Attack] = {
    "250 silent connections": silent,
    "250 half heads": half_heads,
    "half bodies": half_bodies,
    "answers that are not read": never_reading,
    "senders who leave": slow_pictures,
    "garbage": garbage,
    "cookies of others": cookies,
    "items that are no files": no_files,
}


def carry_out(server: Served, name: str) -> Case:
    """One attack; afterwards the server has to be quiet, small and at work."""
    before, began, said = server.megabytes(), time.monotonic(), server.said
    complaints = ATTACKS[name](server)
    seconds = time.monotonic() - began
    server.hang_up()
    if news := server.said.removeprefix(said):
        complaints.append(f"said {news[:200]!r}")
    grown = server.megabytes() - before
    if grown > MEGABYTES:
        complaints.append(f"took {grown:.0f} MB")
    return Case(name, False, seconds, grown, complaints + honest(server))


def stop(server: Served, hold: Attack | None = None) -> list[str]:
    """Ctrl-C, whatever is going on."""
    if hold is not None:
        hold(server)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    try:
        server.process.wait(60)
    except subprocess.TimeoutExpired:
        return ["Ctrl-C did not end it"]
    waited = time.monotonic() - began
    complaints = [f"Ctrl-C took {waited:.1f} s"] if waited > STOP_SECONDS else []
    if "Traceback" in server.said:
        complaints.append(f"said {server.said[-300:]!r}")
    return complaints


def hold(server: Served) -> list[str]:
    """Uploads that take seconds, a body that does not come, a silent connection."""
    for _ in range(6):
        length = f"Content-Length: {len(SLOW)}\r\n"
        server.send(server.head("POST", "/api/search", length) + SLOW)
    server.send(server.head("POST", "/api/search", "Content-Length: 9\r\n"))
    server.connect()
    time.sleep(0.3)
    return []


def prepare_run(home: Path) -> Path:
    """A run of pictures with an index of them."""
    data, run = write_pictures(home / "data"), home / "run"
    for words in (("train", data, "--out", run, *FLAGS, "--epochs", "1"), ("index", run)):
        ended = run_measured(home, *words)
        assert ended.code == 0, ended.said
    return run


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Every attack on one server, then some on servers of their own."""
    run = prepare_run(home)
    with served(home, run) as server:
        honest(server)
        for name in ATTACKS:
            yield carry_out(server, name)
        began = time.monotonic()
        yield Case("Ctrl-C, idle", False, time.monotonic() - began, 0, stop(server))
    with served(home, run) as server:
        began = time.monotonic()
        found = stop(server, hold)
        yield Case("Ctrl-C, at work", False, time.monotonic() - began, 0, found)
    with served(home, run, descriptors=80) as server:
        honest(server)
        began = time.monotonic()
        found = silent(server) + stop(server)
        if len(server.said) > 1000:
            found.append(f"said {len(server.said):,} bytes")
        yield Case("few descriptors", False, time.monotonic() - began, 0, found)
