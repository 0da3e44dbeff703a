"""The page behind a real nginx with TLS, in the configuration that docs/photos.md shows."""

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from nofuss.errors import UsageError
from nofuss.search.page.guard import AT_ONCE, read_origin
from nofuss.search.page.server import serve
from tests.search.page.test_server import encode
from tests.search.serving import Answer, Server, serving

DOCS = Path(__file__).parents[3] / "docs" / "photos.md"
NAME = "photos.example"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://photos.example", "https://photos.example"),
        ("https://Photos.Example/", "https://photos.example"),
        ("https://photos.example:443", "https://photos.example"),
        ("http://photos.example:443", "http://photos.example:443"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_an_origin_is_what_browsers_send(text: str, origin: str) -> None:
    assert read_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    ["photos.example", "https://photos.example/page", "ftp://photos.example", "https://a@b", "null",
     "https://", "https://a:b", "https://a?b", "https://ä.example"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--origin is"):
        read_origin(text)


def test_a_proxy_needs_the_token(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--origin .* so a token is needed"):
        serve(tmp_path, host="127.0.0.1", port=0, token=False, origin=f"https://{NAME}")


@dataclass(frozen=True)
class Proxied:
    """The page behind nginx; `server.port` is nginx'."""

    server: Server
    inside: int
    """The port of the page itself."""
    certificate: Path

    def request(
        self,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        host: str = NAME,
        signed_in: bool = True,
    ) -> Answer:
        context = ssl.create_default_context(cafile=self.certificate)
        line = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        connection = http.client.HTTPSConnection(NAME, self.server.port, timeout=60)
        connection.sock = context.wrap_socket(line, server_hostname=NAME)
        cookie = f"nofuss-{self.inside}={self.server.token}"
        given = {"Host": f"{host}:{self.server.port}", **(headers or {})}
        try:
            given |= {"Cookie": cookie} if signed_in else {}
            connection.request("GET" if body is None else "POST", path, body, given)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    @contextmanager
    def unfinished(self, count: int, *, address: str, port: int, more: str = "") -> Iterator[None]:
        """Requests from an address, straight to the page, that announce a picture and wait."""
        head = (
            f"POST /api/search HTTP/1.1\r\nHost: localhost:{self.inside}\r\n"
            f"Cookie: nofuss-{self.inside}={self.server.token}\r\n{more}"
            "Content-Length: 100000\r\n\r\nx"
        )
        with ExitStack() as stack:
            for _ in range(count):
                line = socket.create_connection(("127.0.0.1", port), 60, (address, 0))
                stack.enter_context(line)
                line.sendall(head.encode())
            time.sleep(0.5)
            yield


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def proxied(picture_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if nginx is None or shutil.which("openssl") is None:
        pytest.skip("needs nginx and openssl: apt-get install nginx-light openssl")
    home, outside, inside = tmp_path_factory.mktemp("nginx"), free_port(), free_port()
    certificate, key = home / f"{NAME}.pem", home / f"{NAME}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}",
         "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    found = re.search(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found, "docs/photos.md shows no configuration of nginx"
    block = found[1].replace("443 ssl", f"127.0.0.1:{outside} ssl").replace("8000", str(inside))
    places = "".join(
        f"{name}_temp_path {home}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = home / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {home}/pid; error_log {home}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {places} {block} }}\n"
    )
    with (
        serving(picture_run, "--origin", f"https://{NAME}:{outside}", port=inside) as server,
        subprocess.Popen([nginx, "-p", str(home), "-c", str(config)]) as process,
    ):
        try:
            wait_for(outside)
            yield Proxied(server, inside, certificate)
        finally:
            process.terminate()
            process.wait(30)


def wait_for(port: int) -> None:
    for _ in range(100):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError("nginx did not start")


def test_the_printed_address_is_the_proxys(proxied: Proxied) -> None:
    server = proxied.server
    assert server.url == f"https://{NAME}:{server.port}/?token={server.token}"
    answer = proxied.request(f"/?token={server.token}", signed_in=False)
    assert answer.status == 200
    assert answer.headers["Set-Cookie"].split("; ")[1:] == [
        *("HttpOnly", "SameSite=Strict", "Path=/", "Secure")
    ]


def test_a_browser_behind_the_proxy_uploads(proxied: Proxied) -> None:
    headers = {"Origin": f"https://{NAME}:{proxied.server.port}", "Sec-Fetch-Site": "same-origin"}
    answer = proxied.request("/api/search?k=5", body=encode("PNG"), headers=headers)
    assert answer.status == 200
    assert len(answer.json["results"]) == 5
    large = proxied.request("/api/search", body=bytes(20 * 2**20), headers=headers)
    assert large.status == 415  # nginx lets it through; it is no picture


def test_others_are_refused_behind_the_proxy_too(proxied: Proxied) -> None:
    port = proxied.server.port
    assert proxied.request("/api/about", signed_in=False).status == 403
    assert proxied.request("/api/about", host="evil.example").status == 403
    for origin in ("https://evil.example", f"http://{NAME}:{port}", f"https://{NAME}", "null"):
        assert proxied.request("/api/about", headers={"Origin": origin}).status == 403


def test_the_page_itself_is_still_there(proxied: Proxied) -> None:
    inside = Server("", proxied.inside, proxied.server.token, proxied.server.process)
    assert inside.request("/api/about").status == 200
    assert inside.upload(
        encode("PNG"), headers={"Origin": f"http://127.0.0.1:{proxied.inside}"}
    ).json["results"]
    assert inside.request("/api/about", host="evil.example").status == 403


def test_requests_are_counted_by_the_forwarded_address(proxied: Proxied) -> None:
    """Of one client; and a client can't lend the proxy's word to others."""
    forwarded = "X-Forwarded-For: 192.0.2.7\r\n"
    one = {"X-Forwarded-For": "192.0.2.7"}
    inside = Server("", proxied.inside, proxied.server.token, proxied.server.process)
    with proxied.unfinished(AT_ONCE, address="127.0.0.1", port=proxied.inside, more=forwarded):
        busy = inside.request("/api/about", headers=one)
        assert (busy.status, busy.headers["Connection"]) == (503, "close")
        assert "too many requests at once" in busy.json["error"]
        assert inside.request("/api/about", headers={"X-Forwarded-For": "192.0.2.8"}).status == 200
        # nginx replaces what a client says of itself
        assert proxied.request("/api/about", headers=one).status == 200
    time.sleep(1)
    assert inside.request("/api/about", headers=one).status == 200


def test_without_a_proxy_nobody_is_forwarded(server: Server) -> None:
    plain = Proxied(server, server.port, Path())
    others = "X-Forwarded-For: 192.0.2.7\r\n"
    with plain.unfinished(AT_ONCE, address="127.0.0.1", port=server.port, more=others):
        assert server.request("/api/about").status == 503
