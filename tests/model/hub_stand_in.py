"""A stand-in for the Hugging Face Hub: its endpoints over real HTTP, repositories in memory.

`huggingface_hub`'s own client talks to it by HF_ENDPOINT. Large files go by git LFS; Xet, the newer
protocol, is a program of its own that the client is told not to use (HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_notToBePrintedAnywhere"


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def add(self, files: dict[str, bytes], deleted: Collection[str] = ()) -> str:
        """Commit files on top of the last commit; return its id."""
        whole = (self.commits[-1][1] if self.commits else {}) | files
        whole = {name: content for name, content in whole.items() if name not in deleted}
        parts = [f"{len(self.commits)}", *(f"{n} {git_id(c)}" for n, c in sorted(whole.items()))]
        oid = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        self.commits.append((oid, whole))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1] if self.commits else ("0" * 40, {})
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.told_storage: list[str | None] = []
        self.in_transit = bytes  # what happens to a large file on its way to the client

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = "") -> None:
        self.answer({"error": "refused"}, status, **({"X_Error_Code": code} if code else {}))

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, name: str) -> Repository | None:
        """The repository; answers as the Hub does where there is none, or it is private."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self.is_known):
            self.refuse(404 if self.is_known else 401, "RepoNotFound")
            return None
        return found

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[0] == "objects":
            self.server.told_storage.append(self.headers.get("Authorization"))
            self.answer(self.server.in_transit(self.server.objects[parts[1]]))
        elif parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.refuse(404)

    def describe(self, name: str, rest: list[str]) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        commit = repository.at(rest[1] if len(rest) > 1 else "main")
        if commit is None:
            self.refuse(404, "RevisionNotFound")
        elif rest[:1] == ["tree"]:
            self.answer([tree_entry(path, content) for path, content in commit[1].items()])
        else:
            siblings = [{"rfilename": path} for path in commit[1]]
            self.answer({"id": name, "sha": commit[0], "siblings": siblings, "private": False})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        commit = repository.at(revision)
        if commit is None or path not in commit[1]:
            self.refuse(404, "RevisionNotFound" if commit is None else "EntryNotFound")
            return
        content, headers = commit[1][path], {"X_Repo_Commit": commit[0]}
        if not is_large(path):
            self.answer(content, ETag=f'"{git_id(content)}"', **headers)
            return
        sha256 = hashlib.sha256(content).hexdigest()
        self.server.objects[sha256] = content
        linked = {"X_Linked_Etag": f'"{sha256}"', "X_Linked_Size": str(len(content))}
        # Another host, as the Hub's storage is: the client must not send it the token.
        place = f"http://localhost:{self.server.server_port}/objects/{sha256}"
        self.answer(b"", 302, Location=place, **linked, **headers)

    def do_PUT(self) -> None:
        content = self.body()
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer(b"")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        self.server.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
            return
        if not self.is_known:
            self.refuse(401)
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [with_upload(each, self.server) for each in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/preupload/" in path:
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if is_large(file["path"]) else "regular"}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        elif "/commit/" in path:
            self.commit("/".join(path.split("/")[3:5]), body)
        else:
            self.refuse(404)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        if name in self.server.repositories:
            self.answer({"url": f"{self.server.address}/{name}"}, 409)
            return
        hidden = asked.get("private") or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private=bool(hidden))
        self.answer({"url": f"{self.server.address}/{name}"})

    def commit(self, name: str, body: bytes) -> None:
        files, deleted = {}, []
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                deleted.append(value["path"])
        oid = self.server.repositories[name].add(files, deleted)
        url = f"{self.server.address}/{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url})


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def tree_entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
    if is_large(path):
        large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
        entry["lfs"] = large | {"pointerSize": 130}
    return entry


def with_upload(asked: dict[str, Any], hub: Hub) -> dict[str, Any]:
    upload = {"href": f"{hub.address}/objects/{asked['oid']}"}
    return {"oid": asked["oid"], "size": asked["size"], "actions": {"upload": upload}}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of loopback."""
    with Hub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
