"""Fuzzing with a time budget: changed bytes into every parser of what strangers send.

Each parser gets a process of its own and an equal share of the time. A case must end in an answer
or in an error of our tree with one line, within bounds of time and memory. Anything else is a
finding, kept with its bytes; a process that hangs or dies is one too, and is started again. Inputs
whose answer was not seen before become seeds.
"""

import multiprocessing
import re
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from nofuss.errors import NofussError
from torture.mutations import mutated

SECONDS, MEGABYTES = 10.0, 400.0
"""Most processor time, and most memory above what the process had before, of one case."""
POLL = 0.1
"""Seconds between looks; time is counted in looks, so that a suspended fuzzer is not late."""
STUCK, STARTING = round(30 / POLL), round(300 / POLL)
"""Looks without a new case after which a process hangs; the first case needs its preparation."""

MOST_RESTARTS = 50


class Target(NamedTuple):
    """A parser, and what it accepts."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    words: Sequence[bytes] = ()
    """Pieces that its format is made of."""
    repaired: Callable[[Random, bytes], bytes] = lambda draw, content: content
    """Corrects checksums, so that what is behind them is reached."""


Prepare = Callable[[Path], Target]
"""Called in the process, with an empty folder."""


class Tally(NamedTuple):
    """What became of the cases of one parser."""

    name: str
    cases: int
    refused: int
    megabytes: float
    seconds: float
    findings: list[str]


def fuzz(
    targets: dict[str, Prepare], home: Path, *, seconds: float, seed: int, keep: Path
) -> Iterator[Tally]:
    """Fuzz one parser after the other for `seconds` in all; findings are written into `keep`."""
    for name, prepare in targets.items():
        yield _fuzz_one(name, prepare, home, seconds / len(targets), seed, keep)


def _fuzz_one(
    name: str, prepare: Prepare, home: Path, seconds: float, seed: int, keep: Path
) -> Tally:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture.fuzz_targets"])
    state = context.Array("d", 4)  # cases, refused, megabytes, seconds
    left, restarts, findings = round(seconds / POLL), 0, list[str]()
    while left > 0:
        place = home / f"{name.replace(' ', '-')}-{restarts}"
        place.mkdir(parents=True)
        arguments = (name, prepare, place, seed + restarts, state, keep)
        process = context.Process(target=_work, args=arguments)
        before, same = state[0], 0
        process.start()
        while left > 0 and process.is_alive():
            time.sleep(POLL)
            cases, same = state[0], same + 1
            if cases != before:
                before, same = cases, 0
                left -= 1
            elif same > (STUCK if cases else STARTING):
                break
        ended = process.exitcode
        process.kill()
        process.join()
        if left > 0:
            what = "hangs" if ended is None else f"died with {ended}"
            findings.append(_keep(keep, name, what, (place / "case").read_bytes(), what))
        restarts += 1
        if restarts == MOST_RESTARTS or not state[0]:  # or it can't even be prepared
            break
    findings += [each for each in _findings(keep, name) if each not in findings]
    cases, refused, megabytes, longest = state[:]
    return Tally(name, int(cases), int(refused), megabytes, longest, findings)


def _work(name: str, prepare: Prepare, home: Path, seed: int, state: Any, keep: Path) -> None:
    """Try one case after the other, until killed."""
    warnings.simplefilter("ignore")
    (home / "case").touch()
    target = prepare(home)
    draw, seeds, answers = Random(seed), list(target.seeds), set[str]()
    for content in seeds:  # or the fuzzing starts from what is refused anyway
        target.read(content)
    held = _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (held + 2 * 2**30, held + 2 * 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        content = target.repaired(draw, mutated(draw, seeds, target.words))
        (home / "case").write_bytes(content)
        state[0] += 1
        answer, refused, seconds, megabytes = _tried(name, target, content, keep)
        state[1] += refused
        state[2], state[3] = max(state[2], megabytes), max(state[3], seconds)
        if answer not in answers and len(seeds) < 500:
            answers.add(answer)
            seeds.append(content)


def _tried(name: str, target: Target, content: bytes, keep: Path) -> tuple[str, bool, float, float]:
    """Read one case; return its answer without numbers, whether it was refused, and its cost."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began, answer, refused = _status("VmRSS"), time.process_time(), "read", False
    try:
        target.read(content)
    except NofussError as error:
        answer, refused = str(error), True
        if "\n" in answer and b"\n" not in content:
            _keep(keep, name, f"two lines: {answer}", content, answer)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "/nofuss/" in f.filename), frames[-1])
        where = f"{Path(place.filename).name}:{place.lineno}"
        answer = f"{type(error).__name__} in {where}"
        _keep(keep, name, answer, content, traceback.format_exc())
    seconds = time.process_time() - began
    megabytes = (_status("VmHWM") - before) / 2**20
    for what, value, most in (("s", seconds, SECONDS), ("MB", megabytes, MEGABYTES)):
        if value > most:
            _keep(keep, name, f"over {most:.0f} {what}", content, f"{value:.1f} {what}: {answer}")
    return re.sub(r"[0-9]+", "0", answer)[:200], refused, seconds, megabytes


def _status(field: str) -> int:
    """Return a field of this process's memory, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def _keep(keep: Path, name: str, what: str, content: bytes, text: str) -> str:
    """Write a finding once; return what it is called."""
    key = sha256(what.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    file = keep / f"{name.replace(' ', '-')}-{key}.case"
    if not file.exists():
        keep.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".txt").write_text(f"{what}\n{text}", errors="backslashreplace")
        file.write_bytes(content)
    return f"{what} ({file})"


def _findings(keep: Path, name: str) -> list[str]:
    files = sorted(keep.glob(f"{name.replace(' ', '-')}-*.txt"))
    return [f"{f.read_text().splitlines()[0]} ({f.with_suffix('.case')})" for f in files]
