"""Decode every bomb of the catalogue in a measured process, list it with `doctor`, upload it.

Decoding must end within 5 seconds of processor time and 300 MB above the idle process, with the
pixels or with one line. `doctor`, `train` and `index` find bombs of every kind in one folder, among
honest pictures, and must do their work.
"""

import io
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode_resized
from torture.bombs import bombs
from torture.measured import Case, judged, run_measured
from torture.more_bombs import UPLOAD
from torture.served import HONEST_SECONDS, honest, prepare_run, served
from torture.training import FLAGS, write_pictures

SECONDS, MEGABYTES = 5.0, 300.0
SLACK = 4 * 2**30
"""Bytes above the idle process at which a bomb is stopped, to protect the machine."""
FIT = Preprocessing(size=224, resize=256)


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Decode bombs one by one, then in one folder, then upload them to the page."""
    folder = home / "bombs"
    folder.mkdir()
    _decode_honest()  # what is loaded only once is not part of a bomb's cost
    for number, (name, make) in enumerate(bombs().items()):
        path = folder / f"{number}.png"
        path.write_bytes(make())
        yield defuse(name, path)
    yield from commands(home, folder)
    yield from uploads(home, folder)


def defuse(name: str, path: Path) -> Case:
    """Decode one file in a separate process, from its path and from memory."""
    worst = Case(name, False, 0.0, 0.0, [])
    for how in ("path", "memory"):
        refused, seconds, megabytes, complaint = _measured(path, from_memory=how == "memory")
        complaints = [f"from {how}: {complaint}"] if complaint else []
        if seconds > SECONDS:
            complaints.append(f"from {how}: {seconds:.1f} s")
        if megabytes > MEGABYTES:
            complaints.append(f"from {how}: {megabytes:.0f} MB")
        worst = Case(
            name,
            refused or worst.refused,
            max(seconds, worst.seconds),
            max(megabytes, worst.megabytes),
            worst.complaints + complaints,
        )
    return worst


def _measured(path: Path, *, from_memory: bool) -> tuple[bool, float, float, str]:
    """Decode in a fork; return whether refused, processor seconds, megabytes, and a complaint."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        result = json.dumps(_decode_measured(path, from_memory)).encode()
        os.write(writing, result)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    if not result:
        return False, 0.0, 0.0, f"ended by signal {os.waitstatus_to_exitcode(status)}"
    refused, seconds, megabytes, complaint = json.loads(result)
    return refused, seconds, megabytes, complaint


def _decode_measured(path: Path, from_memory: bool) -> tuple[bool, float, float, str]:
    signal.alarm(120)
    size = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + SLACK, size + SLACK))
    content = io.BytesIO(path.read_bytes()) if from_memory else path
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = _status("VmRSS"), time.process_time()
    refused, complaint = False, ""
    try:
        decode_resized(content, FIT)
    except PictureError as error:
        refused = True
        complaint = str(error) if "\n" in str(error) else ""
    except BaseException as error:
        complaint = f"{type(error).__name__}: {error}"
    spent = time.process_time() - began
    return refused, spent, (_status("VmHWM") - before) / 10**6, complaint


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{key}:")[1].split()[0])


def _decode_honest() -> None:
    with io.BytesIO() as file:
        Image.new("RGB", (300, 300)).save(file, "JPEG")
        decode_resized(io.BytesIO(file.getvalue()), FIT)


def commands(home: Path, folder: Path) -> Iterator[Case]:
    """Run commands on bombs among honest pictures; every third bomb, to stay within minutes."""
    data = write_pictures(home / "mixed")
    for file in sorted(folder.iterdir())[::3]:
        if file.stat().st_size < UPLOAD:
            shutil.copy(file, data / "class 0" / f"bomb-{file.name}")
    (data / "class 1" / "narrow.png").write_bytes(bombs()["PNG, 2,000 × 1"]())
    run = home / "mixed-run"
    idle = run_measured(home, "doctor", write_pictures(home / "sound")).megabytes
    for words in (
        ("doctor", data),
        ("train", data, "--out", run, *FLAGS, "--epochs", "1"),
        ("index", run, data),
    ):
        ended = run_measured(home, *words)
        others = [] if ended.code == 0 else [f"exit {ended.code}"]
        if words[0] == "doctor" and "too narrow" not in ended.said:
            others.append("doctor does not list the narrow ones")
        case = judged(f"{words[0]} over many of them", ended, *others)
        # As many threads as processors decode at once, and the limit holds for each.
        above = (ended.megabytes - idle) / (os.cpu_count() or 1)
        yield case._replace(megabytes=above)


def uploads(home: Path, folder: Path) -> Iterator[Case]:
    """Upload every bomb that is not too large, with an honest client before and after."""
    place = home / "page"
    place.mkdir()
    with served(place, prepare_run(place)) as server:
        honest(server)
        idle = server.megabytes()
        for number, name in enumerate(bombs()):
            content = (folder / f"{number}.png").read_bytes()
            if len(content) > UPLOAD:
                continue
            began, complaints = time.monotonic(), list[str]()
            try:
                status, answer = server.ask("/api/search", content)
                if status not in (200, 413, 415, 422):
                    complaints.append(f"{status} {answer[:100]!r}")
            except OSError as error:
                complaints.append(f"{type(error).__name__} within {HONEST_SECONDS:.0f} s")
                status = 0
            seconds = time.monotonic() - began
            taken = server.megabytes() - idle
            if taken > MEGABYTES:
                complaints.append(f"{taken:.0f} MB")
            yield Case(f"upload: {name}", status != 200, seconds, taken, complaints)
        yield Case("after all uploads", False, 0.0, 0.0, honest(server))
