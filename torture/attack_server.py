"""Attacks on `nofuss serve`: connections, requests, bodies and files that are meant to block it.

Each attack gets a running server and returns complaints. After each attack an honest client must be
served as before, and the server must not have printed anything.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from nofuss.data import decode_pool
from torture.bombs import jpeg, with_scans
from torture.measured import Case
from torture.served import Served, children, honest, prepare_run, served

STOP_SECONDS = 4.0
"""Ctrl-C must end it within two; the rest is for a busy machine."""
MEGABYTES = 300.0
"""Most memory for one picture, above an idle process."""


SLOW = with_scans(jpeg(2_400, 2_400, "L", progressive=True), 250)
"""Within the limits, and takes some seconds to decode."""
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
        server.send(server.head(path="/search.js") * 50)
    return honest(server)


def slow_pictures(server: Served) -> list[str]:
    """Upload slow pictures and disconnect: those that wait must not be decoded."""
    length = f"Content-Length: {len(SLOW)}\r\n"
    for _ in range(12):
        line = server.send(server.head("POST", "/api/search", length) + SLOW)
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
    for pid in children(server.process.pid):
        with suppress(OSError):
            parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def garbage(server: Served) -> list[str]:
    """Send what is not a request, or hardly one."""
    for content in GARBAGE.values():
        for _ in range(5):
            line = server.send(content)
            with suppress(OSError):
                line.settimeout(0.2)
                line.recv(1000)
    return honest(server)


def cookies(server: Served) -> list[str]:
    """Send cookies of other applications beside the token."""
    return [
        f"locked out by the cookie {cookie!r}"
        for cookie in COOKIES
        if server.ask("/api/about", cookie=f"{cookie}; ")[0] != 200
    ]


def no_files(server: Served) -> list[str]:
    """Replace files of items by pipes, devices, sockets and sparse terabytes."""
    items = json.loads(server.ask("/api/map")[1])["items"]
    names = [json.loads(server.ask(f"/api/items/{key}")[1])["name"] for key in items]
    data = server.run.parent / "data"
    complaints, taken = [], list[tuple[Path, Path]]()
    with ExitStack() as stack:
        for row, (kind, make) in enumerate(NO_FILES.items()):
            path = data / names[row]
            path.rename(path.with_suffix(".kept"))
            taken.append((path, path.with_suffix(".kept")))
            make(path, stack)
            began = time.monotonic()
            status, _ = server.ask(f"/pictures/{items[row]}")
            if status != 404 or time.monotonic() - began > 7:
                complaints.append(f"{kind}: {status} after {time.monotonic() - began:.1f} s")
    for path, kept in taken:
        path.unlink()
        kept.rename(path)
    return complaints + honest(server)


def feedback(server: Served) -> list[str]:
    """Send feedback that no page would send, most without the token."""
    item, other = server.keys[:2]
    query = {"item": item}
    bodies = [
        *(b"[" * 10**4, b"\xff" * 10**4, b"{}", b"null", b'{"query": ' * 5000, b" " * 2**17),
        *map(_json, ({"query": query, "said": [{"item": other, "same": "x"}] * 400},)),
        *map(_json, ({"query": query, "said": [{"item": other, "same": True}] * 400},)),
        *map(_json, ({"query": {"vector": "A" * 50_000}}, {"item": item, "label": "\0" * 9000})),
        *map(_json, ({"item": "../" * 5000, "label": "x"}, {"item": [item] * 1000})),
    ]
    before, complaints = _files(server.run), []
    for path, content in itertools.product(("feedback", "learn", "undo", "labels"), bodies):
        head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        foreign = f"Origin: http://evil.example\r\n{head}"
        for line in (
            server.head("POST", f"/api/{path}", foreign),
            server.head("POST", f"/api/{path}", head).replace(server.token.encode(), b"guess"),
        ):
            server.send(line + content)
    if _files(server.run) != before:
        complaints.append("a stranger changed the run")
    for path, content in itertools.product(("feedback", "labels"), bodies):
        head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        server.send(server.head("POST", f"/api/{path}", head) + content)
    for _ in range(20):  # acts that nobody waits for
        content = _json({"query": query})
        head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        for path in ("learn", "undo"):
            server.send(server.head("POST", f"/api/{path}", head) + content).close()
    for _ in range(20):  # and bodies that never come
        head = "Content-Type: application/json\r\nContent-Length: 60000\r\n"
        server.send(server.head("POST", "/api/feedback", head) + b"{")
    return complaints + honest(server)


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _files(run: Path) -> dict[str, int]:
    """Return the files of a run and when they changed."""
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


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
    grown = server.megabytes() - before
    if grown > MEGABYTES:
        complaints.append(f"took {grown:.0f} MB")
    return Case(name, False, seconds, grown, complaints + honest(server))


def stop(server: Served, hold: Attack | None = None) -> list[str]:
    """Send Ctrl-C, during the attack `hold` if there is one."""
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
    """Send slow uploads, a request without its body, and open an idle connection."""
    for _ in range(6):
        length = f"Content-Length: {len(SLOW)}\r\n"
        server.send(server.head("POST", "/api/search", length) + SLOW)
    server.send(server.head("POST", "/api/search", "Content-Length: 9\r\n"))
    server.connect()
    time.sleep(0.3)
    return []


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Run every attack on one server, then some on separate servers."""
    run = prepare_run(home)
    with served(home, run) as server:
        honest(server)
        for name in ATTACKS:
            yield carry_out(server, name)
        began = time.monotonic()
        found = stop(server)
        yield Case("Ctrl-C, idle", False, time.monotonic() - began, 0, found)
    with served(home, run) as server:
        began = time.monotonic()
        found = stop(server, hold)
        yield Case("Ctrl-C, at work", False, time.monotonic() - began, 0, found)
