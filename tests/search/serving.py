"""The real server in a process of its own, and requests as an attacker would write them."""

import http.client
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.running import command


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    url: str
    port: int
    token: str
    process: subprocess.Popen[str]

    @property
    def cookie(self) -> str:
        return f"nofuss-{self.port}={self.token}"

    def request(
        self,
        path: str,
        *,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        host: str | None = None,
        signed_in: bool = True,
    ) -> Answer:
        """One request, its path and headers sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
            if signed_in:
                connection.putheader("Cookie", self.cookie)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def item(self, number: int) -> str:
        """The key of an item, by its place in the index."""
        keys: list[str] = self.request("/api/map").json["items"]
        return keys[number]

    def upload(self, picture: bytes, **options: Any) -> Answer:
        return self.request("/api/search?k=5", method="POST", body=picture, **options)


@contextmanager
def serving(run: Path, *options: str, port: int = 0) -> Iterator[Server]:
    """`nofuss serve RUN`, by default on a free port, until the block ends."""
    with subprocess.Popen(
        command("serve", run, "--port", str(port), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if found := re.search(r"open (https?://\S+:(\d+)/(?:\?token=(\S+))?)", line):
                    yield Server(found[1], int(found[2]), found[3] or "", process)
                    return
            raise AssertionError(f"the server did not start: {said}")
        finally:
            process.terminate()
            process.wait(30)
