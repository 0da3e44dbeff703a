"""A file system that stops responding, as a network drive does whose server is gone.

`python -m torture.dead_mount SOURCE TARGET AFTER COUNT` shows the folder SOURCE read-only at TARGET
by FUSE, prints "ready", and after COUNT answers to the operation AFTER prints "dead" and answers
nothing any more. Who asks then waits in the system, where only a kill ends the waiting. It unmounts
when its standard input ends. Needs Linux, /dev/fuse, and the right to mount.
"""

import ctypes
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPERATIONS = {"mount": 26, "lookup": 1, "opendir": 27, "open": 14, "read": 15}
_FORGET, _GETATTR, _READDIR, _RELEASEDIR, _RELEASE, _STATFS = (2, 42), 3, 28, 29, 18, 17
_ENOENT, _ENOSYS, _EROFS = 2, 38, 30
_DETACH = 2


def can_mount() -> bool:
    """Return whether this process may mount such a file system."""
    return sys.platform == "linux" and os.path.exists("/dev/fuse") and os.geteuid() == 0


@contextmanager
def dying(source: Path, target: Path, after: str, count: int = 1) -> Iterator[Path]:
    """Mount the file system; yield a file that exists once it is dead."""
    target.mkdir(exist_ok=True)
    flag = target.with_name("dead")
    flag.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torture.dead_mount", str(source), str(target), after]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*words, str(count), str(flag)], text=True, **pipes) as server:  # type: ignore[call-overload]
        assert server.stdin is not None
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise RuntimeError(f"can't mount {target}")
        try:
            yield flag
        finally:
            server.stdin.close()
            server.wait(30)


class Mount:
    """The side of the file system that answers."""

    def __init__(self, source: str, target: str) -> None:
        self.paths, self.target = {1: source}, target
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other"
        words = (b"nofuss-dead", target.encode(), b"fuse", 0, options.encode())
        self._libc = ctypes.CDLL(None, use_errno=True)
        if self._libc.mount(*words):
            raise OSError(ctypes.get_errno(), "mount")

    def serve(self, after: int, count: int) -> bool:
        """Answer until there were so many operations; False if standard input ended before."""
        while count:
            ready, _, _ = select.select([self.device, sys.stdin], [], [])
            if sys.stdin in ready:
                return False
            request = os.read(self.device, 2**18)
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            error, body = self._answer(operation, node, request[40:])
            if operation not in _FORGET:
                head = struct.pack("<IiQ", 16 + len(body), -error, unique)
                os.write(self.device, head + body)
            count -= operation == after
        return True

    def unmount(self) -> None:
        """Take it away; whoever waits gets an error."""
        self._libc.umount2(self.target.encode(), _DETACH)
        os.close(self.device)

    def _answer(self, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
        path = self.paths.get(node, "")
        if operation == OPERATIONS["mount"]:
            return 0, struct.pack("<IIIIHHIIHHI28x", 7, 31, 2**17, 0, 12, 9, 2**17, 1, 32, 0, 0)
        if operation == OPERATIONS["lookup"]:
            return self._entry(os.path.join(path, os.fsdecode(body.rstrip(b"\0"))))
        if operation == _GETATTR:
            return 0, struct.pack("<QII", 0, 0, 0) + _attributes(path)
        if operation in (OPERATIONS["opendir"], OPERATIONS["open"]):
            flags = struct.unpack_from("<I", body)[0]
            writes = flags & (os.O_WRONLY | os.O_RDWR)
            return (_EROFS, b"") if writes else (0, struct.pack("<QII", 0, 0, 0))
        if operation in (_READDIR, OPERATIONS["read"]):
            _, offset, size = struct.unpack_from("<QQI", body)
            return 0, _listing(path, offset) if operation == _READDIR else _part(path, offset, size)
        if operation in (_RELEASE, _RELEASEDIR):
            return 0, b""
        if operation == _STATFS:
            return 0, struct.pack("<QQQQQIIII24x", 9, 9, 9, 9, 9, 4096, 255, 4096, 0)
        return _ENOSYS, b""

    def _entry(self, path: str) -> tuple[int, bytes]:
        try:
            attributes = _attributes(path)
        except OSError:
            return _ENOENT, b""
        node = next((n for n, p in self.paths.items() if p == path), len(self.paths) + 1)
        self.paths[node] = path
        return 0, struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes


def _attributes(path: str) -> bytes:
    status = os.lstat(path)
    times = [int(status.st_mtime)] * 3
    numbers = (status.st_ino, status.st_size, status.st_blocks, *times, 0, 0, 0)
    owners = (status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0)
    return struct.pack("<QQQQQQIIIIIIIIII", *numbers, status.st_mode, *owners)


def _listing(path: str, offset: int) -> bytes:
    found = b""
    for number, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
        mode, text = os.lstat(os.path.join(path, name)).st_mode, os.fsencode(name)
        entry = struct.pack("<QQII", number, number, len(text), stat.S_IFMT(mode) >> 12) + text
        entry += bytes(-len(entry) % 8)
        if len(found) + len(entry) > 4000:
            break
        found += entry
    return found


def _part(path: str, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def main() -> None:
    """Serve, die, and unmount in the end."""
    source, target, after, count, flag = sys.argv[1:]
    mount = Mount(source, target)
    try:
        print("ready", flush=True)
        if mount.serve(OPERATIONS[after], int(count)):
            Path(flag).touch()
            sys.stdin.read()
    finally:
        mount.unmount()


if __name__ == "__main__":
    main()
