"""The page under many clients while it learns: `python -m benchmarks.page RUN`.

RUN: of pictures. 200 clients on 8 addresses of this machine search without a pause for a minute;
meanwhile the page learns from some marks and undoes it, in turn. Printed are the times of the
searches, what was refused, and whether any answer mixes two states: of one version, all answers to
one question must be the same, and of the two states there may be only two answers. The copy of the
run in which it learns is deleted afterwards.
"""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS, ADDRESSES, SECONDS = 200, 8, 60.0
ASKED = 20
"""Items that are searched from."""


@dataclass
class Seen:
    """What the clients were answered."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    answers: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Question and version → the distinct answers."""
    acts: int = 0


class Client:
    """One connection from one address, kept open."""

    def __init__(self, number: int, port: int, token: str) -> None:
        self.address = f"127.0.0.{2 + number % ADDRESSES}"
        self.port, self.token = port, token
        self.pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, content: object = None) -> tuple[int, Any]:
        """Send a request; return status and JSON."""
        body = b"" if content is None else json.dumps(content).encode()
        head = (
            f"{'GET' if content is None else 'POST'} {path} HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{self.port}\r\nCookie: nofuss-{self.port}={self.token}\r\n"
        )
        if content is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.pipe is None:
            where = ("127.0.0.1", self.port)
            self.pipe = await asyncio.open_connection(*where, local_addr=(self.address, 0))
        reader, writer = self.pipe
        writer.write(head.encode() + b"\r\n" + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = re.search(r"content-length: (\d+)", answer)
        assert found, answer
        content = json.loads(await reader.readexactly(int(found[1])))
        if "connection: close" in answer:
            self.close()
        return int(answer.split(" ", 2)[1]), content

    def close(self) -> None:
        """Disconnect."""
        if self.pipe is not None:
            self.pipe[1].close()
            self.pipe = None


async def searches(client: Client, items: list[str], until: float, seen: Seen) -> None:
    """Search from one item after the other."""
    random = np.random.default_rng(id(client) % 2**32)
    while time.monotonic() < until:
        item = items[int(random.integers(len(items)))]
        began = time.perf_counter()
        try:
            status, answer = await client.ask(f"/api/search?item={item}")
        except (OSError, EOFError, AssertionError) as error:
            seen.errors[type(error).__name__] += 1
            client.close()
            continue
        seen.seconds.append(time.perf_counter() - began)
        if status != 200:
            seen.errors[f"{status} {answer.get('error', '')[:60]}"] += 1
            continue
        found = [(each["item"], each["distance"]) for each in answer["results"]]
        seen.answers[item, answer.get("version", "")].add(json.dumps(found))


async def learns(client: Client, until: float, seen: Seen) -> None:
    """Learn and undo in turn."""
    while time.monotonic() < until:
        for act in ("learn", "undo"):
            status, answer = await client.ask(f"/api/{act}", {})
            seen.acts += 1
            if status != 200:
                seen.errors[f"{act}: {status} {answer.get('error', '')[:60]}"] += 1


async def load(port: int, token: str) -> Seen:
    """Mark some results, then do all of it."""
    seen, first = Seen(), Client(0, port, token)
    items = (await first.ask("/api/map"))[1]["items"][::7][:ASKED]
    found = (await first.ask(f"/api/search?item={items[0]}&k=24"))[1]["results"]
    said = [{"item": each["item"], "same": at % 2 == 0} for at, each in enumerate(found)]
    status, answer = await first.ask("/api/feedback", {"query": {"item": items[0]}, "said": said})
    assert status == 200, answer
    clients = [Client(number, port, token) for number in range(1, CLIENTS)]  # and the first
    until = time.monotonic() + SECONDS
    work = [searches(client, items, until, seen) for client in clients]
    await asyncio.gather(*work, learns(first, until, seen))
    return seen


def main(run: Path) -> None:
    """Serve a copy of the run and print what the clients saw."""
    with tempfile.TemporaryDirectory() as home:
        copy = Path(shutil.copytree(run, Path(home) / "run"))
        command = [sys.executable, "-m", "nofuss", "serve", str(copy), "--port", "0"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            assert server.stdout is not None
            try:
                lines = (re.search(r":(\d+)/\?token=(\S+)", line) for line in server.stdout)
                address = next(filter(None, lines))
                seen = asyncio.run(load(int(address[1]), address[2]))
            finally:
                server.terminate()
    report(seen)


def report(seen: Seen) -> None:
    """Print it."""
    p50, p95, p99 = 1000 * np.quantile(seen.seconds, [0.5, 0.95, 0.99])
    print(
        f"{CLIENTS} clients on {ADDRESSES} addresses, {SECONDS:.0f} s: {len(seen.seconds):,} "
        f"searches, p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms; learned and undone "
        f"{seen.acts} times"
    )
    of_item: dict[str, set[str]] = defaultdict(set)
    for (item, _), answers in seen.answers.items():
        of_item[item] |= answers
    versions = len({version for _, version in seen.answers})
    of_one = max(map(len, seen.answers.values()))
    print(
        f"errors: {dict(seen.errors) or 'none'}; {versions} versions; most answers to one "
        f"question: {of_one} of one version, {max(map(len, of_item.values()))} in all (two states)"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
