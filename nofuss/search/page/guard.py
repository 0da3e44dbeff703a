"""Decide who may use the page's server: a browser on this machine, with the token it was given.

Every request is checked before anything else sees it, and every response has the headers that
keep a browser from doing more with it than showing it.

    another Host      a name that someone else points at this machine (DNS rebinding)
    another Origin    another site's script or form in the same browser
    no token          another user of this machine or network
    too many at once  a client that would keep the others out

Behind a proxy (`--origin https://photos.example`) that Host and that Origin are ours too.
"""

import hmac
import ipaddress
import json
import logging
import re
import socket
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nofuss.errors import UsageError

log = logging.getLogger("nofuss")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
ORIGIN = re.compile(rf"(https?)://{HOST.pattern}/?")
PORTS = {"http": "80", "https": "443"}
"""The ports that browsers leave out."""
CLOSE = {"Connection": "close"}
AT_ONCE = 64
"""Most requests that are answered at the same time for one address."""
FOREIGN_HOST = "this server answers to its own address only"
FOREIGN_SITE = "requests from other sites are refused"
NO_TOKEN = "open the address that `nofuss serve` printed: its token is missing here"
# Without styles: nothing but this text may be read without the token.
REFUSAL = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>nofuss search: access denied</title>
<h1>This page can't be opened like this</h1>
<p>The server's reason: {reason}.</p>
<p>In the terminal where <code>nofuss serve</code> runs, find the line <code>open http://…/?token=…
</code> and open that address, with its token, in this browser. A server that was started again has
a new token.</p>
"""


class Json(Response):
    """JSON in ASCII: half a pair of surrogates, which names may hold, has no UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content; ValueError for NaN or infinity, which no browser reads."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Guard:
    """Wraps the application; `token` None lets everyone on this machine in.

    origin: what browsers see of a proxy in front of it, as `read_origin` returns it.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, token: str | None, origin: str | None = None
    ) -> None:
        self.app, self.port, self.token, self.origin = app, port, token, origin
        self.proxy = urlsplit(origin or "").hostname
        self.requests: Counter[str] = Counter()  # under way, of each address
        self.loopback = is_loopback(host)
        names = ["localhost"]
        if not self.loopback:
            names += [host, socket.gethostname(), socket.getfqdn()]
        self.names = {name.lower() for name in names}
        self.cookie = f"nofuss-{port}"  # cookies are shared between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request with 403, or pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            return
        asked = HTTPConnection(scope)
        given = asked.query_params.get("token", "")
        by_address = self._is_token(given)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    out[name] = value
                if by_address and scope["path"] == "/":
                    cookie = f"{self.cookie}={given}; HttpOnly; SameSite=Strict; Path=/"
                    is_secure = (self.origin or "").startswith("https")
                    out.append("Set-Cookie", cookie + "; Secure" * is_secure)
                message["headers"] = out.raw
            await send(message)

        app: ASGIApp = self._answer
        if reason := self._refusal(asked, by_address):
            app = Json({"error": reason}, 403, CLOSE)
            if "text/html" in asked.headers.get("accept", ""):  # an address bar, not a script
                app = HTMLResponse(REFUSAL.format(reason=reason), 403, CLOSE)
        await app(scope, receive, send_guarded)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; print our own errors in one line, and none of the client's."""
        address = scope["client"][0] if scope["client"] else ""
        if self.requests[address] >= AT_ONCE:
            busy = Json({"error": "too many requests at once; try again"}, 503, CLOSE)
            await busy(scope, receive, send)
            return
        self.requests[address] += 1
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            log.error(f"{scope['path']} failed: {type(error).__name__}: {error}")
        finally:
            self.requests[address] -= 1
            self.requests += Counter()  # forgets those at zero

    def _refusal(self, asked: HTTPConnection, by_address: bool) -> str:
        """Return why a request is refused; empty if it is not."""
        hosts, origins = asked.headers.getlist("host"), asked.headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return FOREIGN_HOST
        if any(origin not in (f"http://{hosts[0]}", self.origin) for origin in origins):
            return FOREIGN_SITE
        site = asked.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and not by_address:
            return FOREIGN_SITE
        has_token = by_address or self._is_token(asked.cookies.get(self.cookie, ""))
        return "" if self.token is None or has_token else NO_TOKEN

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server: host and port, and nothing else."""
        found = HOST.fullmatch(host.lower())
        if found is None:
            return False
        name, port = found[1].strip("[]"), int(found[2] or 80)
        if name == self.proxy:
            return True  # a proxy may pass its port on, or not
        # DNS rebinding needs a name: a number in the Host header is safe on any interface.
        is_known = name in self.names or (is_loopback(name) if self.loopback else is_number(name))
        return is_known and port == self.port

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def is_number(host: str) -> bool:
    """Return whether a host is an address in digits, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine only."""
    is_local = is_number(host) and ipaddress.ip_address(host).is_loopback
    return is_local or host.lower() == "localhost"


def read_origin(text: str) -> str:
    """Return the origin at which browsers reach a proxy, as they write it; UsageError otherwise."""
    found = ORIGIN.fullmatch(text.lower())
    if found is None:
        raise UsageError(
            f"--origin is {text!r}; expected what browsers open, without a path, as in "
            "https://photos.example"
        )
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port not in (None, PORTS[scheme]) else "")
