"""Attacks on `nofuss serve`, and an honest client that must be served meanwhile.

Connections, requests, bodies, pictures and files that are meant to block it. Each attack gets a
running server and returns complaints. Afterwards an honest client must be served as before, and
the server must not have printed anything.
"""

import http.client
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from PIL import Image

from nofuss.data import decode_pool
from torture.bombs import BOMBS, jpeg, with_scans
from torture.commands import Case
from torture.training import FLAGS, command, environment, write_pictures

HONEST_SECONDS = 12.0
"""How long an honest client waits, whatever others do: silent connections end after 10."""
STOP_SECONDS = 4.0
"""Ctrl-C must end it within two; the rest is for a busy machine."""
BOMB_SECONDS, MEGABYTES = 6.0, 300.0
"""Most for one picture; memory above an idle process."""
SLOW = with_scans(jpeg(2_400, 2_400, "L", progressive=True), 250)
"""Within the limits, and takes some seconds to decode."""


def _honest_picture() -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (64, 48), "teal").save(file, "PNG")
        return file.getvalue()


HONEST = _honest_picture()


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

    def send(self, content: bytes) -> socket.socket:
        """Send bytes over a new connection that stays; the server may close it meanwhile."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=HONEST_SECONDS)
        self.held.append(line)
        with suppress(OSError):
            line.sendall(content)
        return line

    def upload(self, content: bytes) -> socket.socket:
        """Send a picture, without waiting for the answer."""
        length = f"Content-Length: {len(content)}\r\n"
        return self.send(self.head("POST", "/api/search", length) + content)

    @cached_property
    def keys(self) -> list[str]:
        """Keys of some items."""
        return [item["item"] for item in json.loads(self.ask("/api/some")[1])["results"]]

    def disconnect(self) -> None:
        """Close all connections."""
        for line in self.held:
            line.close()
        self.held.clear()

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send an honest request; return status and body, 0 and the error if there is none."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HONEST_SECONDS)
        headers = {"Cookie": f"nofuss-{self.port}={self.token}"}
        try:
            line.request("GET" if body is None else "POST", path, body, headers)
            answer = line.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            line.close()

    def children(self) -> list[Path]:
        """Return the places in /proc of its running processes."""
        return [Path(f"/proc/{pid}") for pid in children(self.process.pid)]

    def megabytes(self, *, decoders_only: bool = False) -> float:
        """Return the peak memory so far of the largest of its processes."""
        peaks = [0]
        own = [] if decoders_only else [Path(f"/proc/{self.process.pid}")]
        for process in (*own, *self.children()):
            with suppress(OSError):
                if decoders_only and b"decode_pool" not in (process / "cmdline").read_bytes():
                    continue  # just forked
                status = (process / "status").read_text()
                peaks += map(int, re.findall(r"VmHWM:\s*(\d+) kB", status))
        return max(peaks) / 1024


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


def prepare_run(home: Path) -> Path:
    """Make a run of pictures with an index of them."""
    data, run = write_pictures(home / "data"), home / "run"
    for words in (("train", data, "--out", run, *FLAGS, "--epochs", "1"), ("index", run)):
        made = subprocess.run(command(*words), env=environment(home), capture_output=True)
        assert made.returncode == 0, made.stderr
    return run


def honest(server: Served) -> list[str]:
    """Return the complaints of an honest client."""
    complaints = []
    for path, body in (
        ("/", None),
        ("/pictures/{}", None),
        ("/api/search?item={}", None),
        ("/api/search", HONEST),
    ):
        began, status, said = time.monotonic(), 0, b""
        while status in (0, 503) and time.monotonic() - began < HONEST_SECONDS:  # full: try again
            status, said = server.ask(path.format(server.keys[0]), body)
            time.sleep(0.1 * (status != 200))
        if status != 200:
            waited = time.monotonic() - began
            complaints.append(f"honest {path}: {status} {said[:80]!r} after {waited:.1f} s")
    return complaints


# Attacks

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
    """Open 250 connections and send nothing."""
    for _ in range(250):
        line = socket.socket()
        line.setblocking(False)  # do not wait where the queue is full
        line.connect_ex(("127.0.0.1", server.port))
        server.held.append(line)
        time.sleep(0.002)
    return honest(server)


def half_heads(server: Served) -> list[str]:
    """Begin 250 requests and do not finish them."""
    for _ in range(250):
        server.send(b"GET / HTTP/1.1\r\nHost: ")
    return honest(server)


def half_bodies(server: Served) -> list[str]:
    """Announce pictures and do not send them."""
    for _ in range(40):
        server.send(server.head("POST", "/api/search", "Content-Length: 100000\r\n") + b"x")
    time.sleep(6)
    return honest(server)


def never_reading(server: Served) -> list[str]:
    """Send requests and do not read the answers."""
    for _ in range(60):
        server.send(server.head(path="/") * 50)
    return honest(server)


def senders_who_leave(server: Served) -> list[str]:
    """Upload slow pictures and disconnect: those that wait must not be decoded."""
    for _ in range(12):
        line = server.upload(SLOW)
        time.sleep(0.1)
        line.close()
    complaints = honest(server)
    time.sleep(decode_pool.SECONDS)  # what was begun is decoded, what waited is not
    busy = _processor_seconds(server)
    time.sleep(1)
    if _processor_seconds(server) - busy > 0.5:
        complaints.append("still decodes for a client that has disconnected")
    return complaints


def _processor_seconds(server: Served) -> float:
    spent = 0.0
    for process in server.children():
        with suppress(OSError):
            parts = (process / "stat").read_text().rpartition(")")[2].split()
            spent += (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def garbage(server: Served) -> list[str]:
    """Send what is not a request, or hardly one."""
    for content in [*GARBAGE.values()] * 5:
        line = server.send(content)
        with suppress(OSError):
            line.settimeout(0.2)
            line.recv(1000)
    return honest(server)


def no_files(server: Served) -> list[str]:
    """Replace files of items by pipes, devices, sockets and sparse terabytes."""
    items = json.loads(server.ask("/api/map")[1])["items"]
    queries = [json.loads(server.ask(f"/api/search?item={key}")[1])["query"] for key in items]
    complaints, taken = [], list[tuple[Path, Path]]()
    with ExitStack() as stack:
        for row, (kind, make) in enumerate(NO_FILES.items()):
            path = server.run.parent / "data" / queries[row]["name"]
            path.rename(path.with_suffix(".kept"))
            taken.append((path, path.with_suffix(".kept")))
            make(path, stack)
            began, (status, _) = time.monotonic(), server.ask(f"/pictures/{items[row]}")
            if status != 404 or time.monotonic() - began > 7:
                complaints.append(f"{kind}: {status} after {time.monotonic() - began:.1f} s")
    for path, kept in taken:
        path.unlink()
        kept.rename(path)
    return complaints + honest(server)


def feedback(server: Served) -> list[str]:
    """Send feedback that no page would send, and do not wait for the answer."""
    item, other = server.keys[:2]
    said = {"query": {"item": item}, "said": [{"item": other, "same": True}] * 400}
    bodies = [b"[" * 10**4, b"\xff" * 10**4, b"{}", b"null", b'{"query": ' * 5000, b" " * 2**17]
    bodies += [json.dumps(each).encode() for each in (said, {"item": "../" * 5000, "label": "x"})]
    head = "Content-Type: application/json\r\nContent-Length: "
    for path, content in itertools.product(("feedback", "labels"), bodies):
        server.send(server.head("POST", f"/api/{path}", f"{head}{len(content)}\r\n") + content)
    for path in ("learn", "undo") * 20:  # acts that nobody waits for
        server.send(server.head("POST", f"/api/{path}", f"{head}2\r\n") + b"{}").close()
    for _ in range(20):  # and bodies that never come
        server.send(server.head("POST", "/api/feedback", f"{head}60000\r\n") + b"{")
    return honest(server)


def _socket(path: Path, stack: ExitStack) -> None:
    line = stack.enter_context(socket.socket(socket.AF_UNIX))
    descriptor = os.open(path.parent, os.O_RDONLY)
    line.bind(f"/proc/self/fd/{descriptor}/{path.name}")  # the whole path may be too long
    os.close(descriptor)


def _sparse(path: Path, _: ExitStack) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NO_FILES: dict[str, Callable[[Path, ExitStack], None]] = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to a terminal": lambda path, _: path.symlink_to("/dev/tty"),
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
    "senders who leave": senders_who_leave,
    "garbage": garbage,
    "items that are no files": no_files,
    "feedback": feedback,
}


def carry_out(server: Served, name: str) -> Case:
    """Run one attack; the server must print nothing, stay small and still answer."""
    before, began, said = server.megabytes(), time.monotonic(), server.said
    complaints = ATTACKS[name](server)
    seconds = time.monotonic() - began
    server.disconnect()
    if news := server.said.removeprefix(said):
        complaints.append(f"said {news[:200]!r}")
    if (grown := server.megabytes() - before) > MEGABYTES:
        complaints.append(f"took {grown:.0f} MB")
    return Case(name, False, seconds, complaints + honest(server))


def explode(server: Served, name: str, idle: float) -> Case:
    """Upload a bomb, and search until it is answered; idle: the memory of a decoder before."""
    content, complaints, peak, began = BOMBS[name](), list[str](), 0.0, time.monotonic()
    for process in server.children():
        with suppress(OSError):
            (process / "clear_refs").write_text("5")  # its peak counts from here
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, "/api/search", content)
        while not answer.done():
            peak = max(peak, server.megabytes(decoders_only=True))
            status, said = server.ask(f"/api/search?item={server.keys[0]}")
            if status != 200:
                complaints.append(f"meanwhile a search got {status} {said[:80]!r}")
            time.sleep(0.02)
    seconds, (status, said) = time.monotonic() - began, answer.result()
    if status not in (200, 415, 422):
        complaints.append(f"{status} {said[:100]!r}")
    if seconds > BOMB_SECONDS:
        complaints.append(f"answered after {seconds:.1f} s")
    if peak - idle > MEGABYTES:
        complaints.append(f"{peak - idle:.0f} MB")
    return Case(name, status != 200, seconds, complaints)


def stop(server: Served, *, busy: bool = False) -> Case:
    """Send Ctrl-C, to a server that is busy with slow uploads if asked."""
    for _ in range(6 if busy else 0):
        server.upload(SLOW)
    began, complaints = time.monotonic(), list[str]()
    server.process.send_signal(signal.SIGINT)
    try:
        server.process.wait(60)
    except subprocess.TimeoutExpired:
        complaints.append("Ctrl-C did not end it")
    seconds = time.monotonic() - began
    if seconds > STOP_SECONDS:
        complaints.append(f"Ctrl-C took {seconds:.1f} s")
    if "Traceback" in server.said:
        complaints.append(f"said {server.said[-300:]!r}")
    return Case(f"Ctrl-C{', at work' * busy}", False, seconds, complaints)


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run every attack and every bomb on one server; stop it, and another at work."""
    run = prepare_run(home)
    with served(home, run) as server:
        honest(server)
        idle = server.megabytes(decoders_only=True)
        for name in ATTACKS:
            yield carry_out(server, name)
        for name in BOMBS:
            yield explode(server, name, idle)
        yield Case("honest pictures afterwards", False, 0.0, honest(server))
        yield stop(server)
    with served(home, run) as server:
        yield stop(server, busy=True)
