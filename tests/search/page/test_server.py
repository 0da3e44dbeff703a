"""The server of the page, attacked as itself: a process, sockets, foreign bytes."""

import base64
import io
import itertools
import re
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient

from nofuss import Index
from nofuss.errors import UsageError
from nofuss.run.directory import Run
from nofuss.search.page.guard import Guard, is_loopback
from nofuss.search.page.routes import MAX_UPLOAD
from nofuss.search.page.server import build_app, serve
from nofuss.search.page.state import open_state
from tests.search.serving import Server, serving
from tests.tiny_run import HOSTILE, draw, train_vectors

HEADERS = {
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def encode(form: str, picture: Image.Image | None = None) -> bytes:
    with io.BytesIO() as file:
        (picture or draw(1, 1)).save(file, form)
        return file.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A few bytes that say they are a huge picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def peak_memory(process: subprocess.Popen[str]) -> int:
    """Bytes that a process has held at most so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# ---- what it is for


def test_an_item_finds_its_nearest(server: Server, picture_run: Path) -> None:
    vectors = Index.load(picture_run / "index").vectors.numpy()
    apart = np.linalg.norm(vectors - vectors[2], axis=1)
    apart[2] = np.inf
    keys = server.request("/api/map").json["items"]
    found = server.request(f"/api/search?item={keys[2]}&k=4").json
    rows = [keys.index(result["item"]) for result in found["results"]]
    np.testing.assert_allclose(
        [r["distance"] for r in found["results"]], np.sort(apart)[:4], atol=1e-3
    )
    np.testing.assert_allclose(apart[rows], np.sort(apart)[:4], atol=1e-3)
    assert [r["rank"] for r in found["results"]] == [1, 2, 3, 4]
    assert found["searching_ms"] > 0


def test_a_filter_leaves_one_class(server: Server) -> None:
    found = server.request(f"/api/search?item={server.item(0)}&k=100&class=plain").json
    assert {result["label"] for result in found["results"]} == {"plain"}
    assert len(found["results"]) == 6


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_each_format_is_searched_with(server: Server, form: str) -> None:
    answer = server.upload(encode(form))
    assert answer.status == 200
    assert len(answer.json["results"]) == 5
    assert answer.json["query"]["picture"].startswith("data:image/")
    assert answer.json["embedding_ms"] > 0


def test_the_map_places_everything(server: Server) -> None:
    found = server.request("/api/map").json
    items = server.request("/api/about").json["items"]
    assert len({*found["items"]}) == items
    assert len(found["places"]) == 2 * items
    assert len(found["stars"]) == 2 * len(found["star_names"]) == 6
    assert all(0 <= place <= 1 for place in found["places"] + found["stars"])
    assert server.request(f"/api/search?item={server.item(1)}&k=2").json["place"] is not None


@pytest.mark.slow
def test_vectors_are_served_without_pictures(tmp_path: Path) -> None:
    with serving(train_vectors(tmp_path)) as server:
        assert server.request("/api/about").json["pictures"] is False
        item = server.item(0)
        assert len(server.request(f"/api/search?item={item}").json["results"]) == 24
        assert server.request(f"/pictures/{item}").status == 404
        assert server.upload(encode("PNG")).status == 400


# ---- who may ask


def test_without_the_token_a_browser_gets_words(server: Server) -> None:
    browser = {"Accept": "text/html,*/*", "Sec-Fetch-Dest": "document"}
    for path in ("/", "/?token=guess", "/nowhere"):
        answer = server.request(path, signed_in=False, headers=browser)
        assert answer.status == 403
        assert answer.headers["Content-Type"].startswith("text/html")
        assert server.token.encode() not in answer.body
        plain = server.request(path, signed_in=False)
        assert "its token is missing here" in plain.json["error"]


def test_the_token_is_changed_for_a_cookie(server: Server) -> None:
    answer = server.request(f"/?token={server.token}", signed_in=False)
    assert answer.status == 200
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"{server.cookie};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert len(server.token) >= 32


OTHER_HOSTS = [
    "evil.example:{port}",
    "evil.example",
    "127.0.0.1",
    "127.0.0.1:1",
    "localhost.evil.example:{port}",
    "192.168.0.7:{port}",
    "127.0.0.1:{port}@evil.example",
    ":{port}",
    "[::1",
    "localhost:{port}:{port}",
]
BAD_FILES = {
    "empty": (b"", "is empty"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>x()</script></svg>", "not a picture"),
    "html": (b"<!doctype html><script>alert(1)</script>", "not a picture"),
    "gif with a script": (b"GIF89a<script>alert(1)</script>", "not a picture"),
    "pdf": (b"%PDF-1.7", "not a picture"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "zeros": (bytes(1000), "not a picture"),
    "cut png": (encode("PNG")[:-40], "cut off"),
    "cut jpeg": (encode("JPEG")[:-200], "cut off"),
    "bomb": (png_claiming(60_000, 60_000), "too many pixels"),
    "tall bomb": (png_claiming(1, 2**31 - 1), "too many pixels"),
    "2,000 × 1": (png_claiming(2_000, 1), "nearly a line"),
    "ppm": (encode("PPM"), "not a picture"),
    "ico": (encode("ICO"), "not a picture"),
}


ORIGINS = ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1"]


def routes(run: Path) -> list[tuple[str, str]]:
    """Every route of the application, as it lists them, with every method it takes."""
    app: Any = build_app(open_state(Run.open(run)), host="127.0.0.1", port=1, token="x").app
    found = [("GET", "/"), ("GET", "/nowhere")]
    for route in app.routes:
        if isinstance(route, Mount):  # the files of the page
            folder = Path(cast(StaticFiles, route.app).directory or "")
            found += [("GET", f"/{file.name}") for file in folder.iterdir()]
        else:
            found += [(method, route.path.format(key=0)) for method in sorted(route.methods)]
    assert {("GET", "/search.js"), ("HEAD", "/pictures/0"), ("POST", "/api/undo")} < {*found}
    return found


def test_every_route_is_behind_the_guard(server: Server, picture_run: Path) -> None:
    """Token, Host and Origin, before anything looks at path, method or body."""
    json = {"Content-Type": "application/json"}
    strangers: list[dict[str, Any]] = [
        {"signed_in": False},
        {"signed_in": False, "headers": json | {"Cookie": f"nofuss-{server.port}=guess"}},
        *({"headers": json | {"Origin": o.format(port=server.port)}} for o in ORIGINS),
        *({"headers": json | {"Sec-Fetch-Site": s}} for s in ("cross-site", "same-site")),
        *({"host": host.format(port=server.port)} for host in OTHER_HOSTS),
    ]
    for (method, path), options in itertools.product(routes(picture_run), strangers):
        answer = server.request(path, method=method, body=b"{}", **options)
        assert answer.status in (400, 403), (method, path, options)
        assert b"results" not in answer.body


def test_localhost_is_ours_whatever_cookies_others_have_set(server: Server) -> None:
    others = 'a_prefs={"theme":"dark"}; b=1,2 3; c; "; x=é; nofuss-1=x; =; '
    headers = {"Cookie": others + server.cookie}
    host = f"localhost:{server.port}"
    assert server.request("/api/about", host=host, headers=headers, signed_in=False).status == 200


def test_our_own_origin_is_ours(server: Server) -> None:
    headers = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}
    assert server.upload(encode("PNG"), headers=headers).status == 200


def test_an_open_interface_needs_the_token(picture_run: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match="so a token is needed"):
            serve(picture_run, host=host, port=0, token=False)


def test_the_host_that_was_asked_for_is_answered() -> None:
    machine = socket.gethostname()
    for host, asked, is_ours in (
        ("photos.lan", "Photos.lan", True),
        ("photos.lan", machine, True),
        ("0.0.0.0", socket.getfqdn(), True),
        ("0.0.0.0", "photos.lan", False),
        ("127.0.0.1", machine, False),
    ):
        app = Guard(Response(), host=host, port=80, token=None)
        assert TestClient(app, f"http://{asked}").get("/").is_success is is_ours, (host, asked)


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "localhost", "::1", "127.8.8.8"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.1.2", "example.org", ""]))


# ---- what is sent


@pytest.mark.parametrize(("content", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_get_one_line(server: Server, content: bytes, words: str) -> None:
    before = peak_memory(server.process) if sys.platform == "linux" else 0
    answer = server.upload(content)
    assert answer.status in (400, 415, 422)
    assert words in answer.json["error"]
    assert "\n" not in answer.json["error"]
    assert "Traceback" not in answer.json["error"]
    if sys.platform == "linux":
        assert peak_memory(server.process) - before < 100 * 2**20
    assert server.upload(encode("PNG")).status == 200  # and it still works


@pytest.mark.skipif(sys.platform != "linux", reason="reads the server's memory from /proc")
def test_five_gigabytes_are_refused_unread(server: Server) -> None:
    before = peak_memory(server.process)
    headers = {"Content-Length": str(5 * 2**30)}
    answer = server.request("/api/search", method="POST", headers=headers)
    assert answer.status == 413
    assert "MB" in answer.json["error"]
    for length in ("99999999999999999999", "-1", "1e9", "0x10"):
        lying = server.request("/api/search", method="POST", headers={"Content-Length": length})
        assert lying.status in (400, 413)
    assert peak_memory(server.process) - before < 2 * MAX_UPLOAD


@pytest.mark.skipif(sys.platform != "linux", reason="reads the server's memory from /proc")
def test_a_body_without_end_is_cut_off(server: Server) -> None:
    """Chunked: its length is not told; the server must hang up by itself."""
    before = peak_memory(server.process)
    sent, piece = 0, b"100000\r\n" + bytes(2**20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(
            f"POST /api/search HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Cookie: {server.cookie}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        try:
            while sent < 5 * 2**30:
                line.sendall(piece)
                sent += 2**20
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 5 * MAX_UPLOAD
    assert peak_memory(server.process) - before < 4 * MAX_UPLOAD
    assert server.upload(encode("PNG")).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/pictures/../../../../etc/passwd",
        "/pictures/..%2f..%2f..%2fetc%2fpasswd",
        "/pictures/%2e%2e/%2e%2e/config.json",
        "/pictures/-1",
        "/pictures/%D9%A3",
        "/pictures/0%00.png",
        "/pictures/100000",
        "/pictures/" + "9" * 5000,
        "/pictures/",
        "/../server.py",
        "/config.json",
        "/api/search?item=nobody",
        "/api/search?item=../../etc/passwd",
        "/api/search",
    ],
    ids=lambda path: path[:40],
)
def test_pictures_are_named_by_number_only(server: Server, path: str) -> None:
    answer = server.request(path)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert "error" in answer.json


@pytest.mark.parametrize(
    "options", ["k=0", "k=501", "k=-1", "k=ten", "k=" + "9" * 5000, "class=nobody"]
)
def test_bad_options_are_refused(server: Server, options: str) -> None:
    assert server.request(f"/api/search?item={server.item(0)}&{options}").status == 400


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert server.request("/api/search", method=method).status == 405


# ---- what is answered


@pytest.mark.parametrize("signed_in", [True, False])
def test_every_answer_carries_the_headers(server: Server, signed_in: bool) -> None:
    for path in ("/", "/search.js", "/page.css", "/api/about", "/pictures/0", "/nowhere"):
        answer = server.request(path, signed_in=signed_in)
        for name, start in HEADERS.items():
            assert answer.headers[name].startswith(start), (path, name)
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "server" not in answer.headers


def test_the_page_needs_nothing_inline(server: Server) -> None:
    page = server.request("/").body.decode()
    assert "<style" not in page
    assert "style=" not in page
    assert page.count("<script") == page.count('<script src="search.js" type="module">')
    assert not re.search(r"\son\w+\s*=", page)


def test_pictures_are_encoded_anew(tmp_path: Path, server: Server) -> None:
    """What hides in a file, before or behind its pixels, does not come out again."""
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "secret")
    with io.BytesIO() as file:
        draw(1, 1).save(file, "PNG", pnginfo=text)
        content = file.getvalue() + b"<script>secret</script>"
    shown = server.upload(content).json["query"]["picture"]
    returned = base64.b64decode(shown.split(",")[1])
    assert b"secret" not in returned
    assert Image.open(io.BytesIO(returned)).size == (40, 40)
    answer = server.request(f"/pictures/{server.item(0)}")
    assert answer.headers["Content-Type"] in ("image/png", "image/jpeg")
    assert Image.open(io.BytesIO(answer.body)).size == (40, 40)


def test_names_are_data_not_markup(server: Server) -> None:
    answer = server.request("/api/about")
    assert answer.headers["Content-Type"] == "application/json"
    assert HOSTILE in answer.json["classes"]
