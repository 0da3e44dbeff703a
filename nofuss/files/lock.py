"""The lock of a run: one command writes into it at a time; a second one ends, or waits.

RUN/.nofuss.lock exists while a process writes, and contains its number, machine, start time and
command. What counts is the system's lock on the file (flock), which ends with the process however
that ends: a file left by a killed process blocks nobody. On file systems without such locks, a
running process of the same machine counts as the writer. Under torchrun the first process holds the
lock for all.
"""

import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nofuss.distributed import processes
from nofuss.errors import RunError, TrainingError
from nofuss.files.atomic import parse_json
from nofuss.files.folders import clear_remains, refuse_link

LOCK = ".nofuss.lock"
PATIENCE = 1.0
"""Seconds to wait for a process that has just ended to release the lock."""
FOLDERS = ("checkpoints", "index", "model", "taught")
"""Folders of a run; none may be a link when the run is written."""
_held: dict[Path, "RunLock"] = {}


def check_in_place(run: Path) -> None:
    """Raise TrainingError if the run that this process has locked is no longer at its path."""
    if run in _held and _held[run].moved(run):
        raise TrainingError(
            f"{run} was moved or deleted while it was being written; resume the run from where it "
            "is now: nofuss train --out RUN --resume"
        )


def _forget_in_child() -> None:
    """Release all locks in a forked process, which may outlive its parent."""
    for lock in list(_held.values()):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)


class _LockedError(RunError):
    """Another process has the lock: `who` says which."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who}; wait until it ends, or stop it, and try again")
        self.who = who


class RunLock:
    """The lock of one run: `take` locks it until the end of the `with`."""

    def __init__(self) -> None:
        self._run: Path | None = None
        self._folder = self._file = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            with suppress(OSError):
                if self._is_named(self._file):
                    # Deleted before it is released: the next process makes a new file.
                    os.unlink(LOCK, dir_fd=self._folder)
            self.close()

    def take(self, run: Path) -> None:
        """Lock the run, or say which process has it; all processes of one command call this."""

        def take() -> str:
            self._take(run)
            return ""

        processes.from_first(take)

    def try_take(self, folder: Path, *, make: bool = False) -> str:
        """Lock a folder and return ""; if another process has it, return which.

        make: make the folder, which the other process deletes when it ends.
        """

        def take() -> str:
            try:
                if make:
                    folder.mkdir(exist_ok=True)
                self._take(folder, patience=0)
            except _LockedError as error:
                return error.who
            except FileNotFoundError:
                if not make:
                    raise
                return f"{folder} is being deleted by another process"
            return ""

        return processes.from_first(take)

    def close(self) -> None:
        """Release the lock, and leave the file."""
        assert self._run is not None
        del _held[self._run]
        os.close(self._file)
        os.close(self._folder)
        self._run = None

    def moved(self, run: Path) -> bool:
        """Return whether the locked run is no longer at its path."""
        try:
            return not os.path.samestat(os.fstat(self._folder), os.stat(run))
        except OSError:
            return True

    def _take(self, run: Path, patience: float = PATIENCE) -> None:
        assert self._run is None, "one lock, one run"
        for name in FOLDERS:
            refuse_link(run / name)
        self._folder = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._file = self._acquire(run, patience)
        except BaseException:
            os.close(self._folder)
            raise
        self._run = run
        _held[run] = self
        for folder in (run, *(run / name for name in FOLDERS)):
            clear_remains(folder)

    def _acquire(self, run: Path, patience: float) -> int:
        until = time.monotonic() + patience
        while True:  # until the file at the path is the one that is locked
            descriptor = self._open(run)
            try:
                is_free = _lock(descriptor)
                if not is_free and time.monotonic() >= until:
                    raise _LockedError(_who(run, _read(descriptor)))
                if is_free and os.fstat(descriptor).st_size and not _read(descriptor):
                    raise _foreign(run)  # it may be a hard link to anything: don't write
                # Between opening and locking, the process that ended may have deleted the file.
                if is_free and self._is_named(descriptor):
                    os.truncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_about()).encode(), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(0.02)

    def _open(self, run: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(LOCK, flags, 0o666, dir_fd=self._folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise OSError(error.errno, error.strerror, str(run / LOCK)) from None
            descriptor = -1
        status = None if descriptor < 0 else os.fstat(descriptor)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            if descriptor >= 0:
                os.close(descriptor)
            raise _foreign(run)
        return descriptor

    def _is_named(self, descriptor: int) -> bool:
        """Return whether the open file is still the one at its path."""
        try:
            named = os.stat(LOCK, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(descriptor), named)


def _foreign(run: Path) -> RunError:
    return RunError(f"{run / LOCK} was not made by nofuss; delete it")


def _lock(descriptor: int) -> bool:
    """Lock the open file; return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return not _is_alive(_read(descriptor))
    return True


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether the owner's process is running; on another machine it counts as running."""
    if not owner or owner["host"] != socket.gethostname():
        return bool(owner)
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _about() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": int(time.time()),
        "command": shlex.join(["nofuss", *sys.argv[1:2]]),
    }


def _read(descriptor: int) -> dict[str, Any]:
    """Read what the owner wrote; empty if it is something else, or not written yet."""
    try:
        content = parse_json(os.pread(descriptor, 4096, 0))
        kinds = {"process": int, "host": str, "since": int, "command": str}
        is_ours = all(type(content[key]) is kind for key, kind in kinds.items())
        if is_ours and 0 < content["process"] < 2**31 and 0 <= content["since"] < 2**34:
            return {key: content[key] for key in kinds}
    except (ValueError, KeyError, TypeError):
        pass
    return {}


def _who(run: Path, owner: dict[str, Any]) -> str:
    """Return the message for the second process: which process holds the lock."""
    who = "another process"
    if owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        where = "" if owner["host"] == socket.gethostname() else f" on {owner['host']!r}"
        who = f"process {owner['process']}{where} ({owner['command']!r}, since {since})"
    return f"{run} is being written by {who}"
