"""Real processes for the tests beside this file: forked here, or started by torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._dynamo  # optimizers load it, which takes a second: once, before the fork

from nofuss.distributed import processes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def fork_together(count: int, work: Callable[[], None]) -> None:
    """Do the work in `count` processes that know each other as torchrun's do.

    Forked by a process that has torch loaded, so that many of them take little time; gloo's threads
    start after the fork.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: those of torch are not used below
            child = os.fork()
        if not child:
            os._exit(_one_of(rank, count, port, work))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * count, f"of {count} processes these failed: {codes}"


def _one_of(rank: int, count: int, port: int, work: Callable[[], None]) -> int:
    told = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_PORT": port}
    told |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({k: str(v) for k, v in told.items()} | {"MASTER_ADDR": "127.0.0.1"})
    os.environ |= {"NOFUSS_TIMEOUT": "60", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        with processes.joined():
            work()
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def environment(**more: str) -> dict[str, str]:
    """One thread each, and our sources; nothing of an outer torchrun."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return kept | ours | more


def torchrun(count: int, *command: str, options: tuple[str, ...] = ("--standalone",)) -> list[str]:
    """The command line of a torchrun with `count` processes."""
    start = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*start, "--nproc-per-node", str(count), *command]


def start(command: list[str], log: Path, **env: str) -> subprocess.Popen[str]:
    """In the background, with everything that is printed in a file."""
    with log.open("w") as file:
        return subprocess.Popen(
            command, env=environment(**env), stdout=file, stderr=subprocess.STDOUT, text=True
        )


def end(agent: subprocess.Popen[str]) -> None:
    """Kill a torchrun and its processes, whatever state they are in."""
    left = workers(agent.pid) if agent.poll() is None else {}
    agent.kill()
    agent.wait()
    for process in left.values():
        os.kill(process, signal.SIGKILL)


def workers(agent: int) -> dict[int, int]:
    """Rank → process, of a running torchrun."""
    found = {}
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
        found |= {rank: int(child) for rank in ranks}
    return found


def wait_for(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    """Until it holds; fails after so many seconds."""
    for _ in _ticks(seconds):
        if condition():
            return
    raise AssertionError(f"{what} took more than {seconds:g} s")


def _ticks(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.05)
