"""Fuzzing with a time budget: changed filters, requests and files of a run.

Each target gets a process of its own and an equal share of the time. A case must end in an answer
or in an error of our tree with one line, within bounds of time and memory. Anything else is a
finding, kept with its bytes; a process that hangs or dies is one too. Inputs whose answer was not
seen before become seeds.
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
from torture.case import Case
from torture.mutations import mutated

FINDINGS = Path("torture-findings")
SECONDS, MEGABYTES = 10.0, 400.0
"""Most processor time of one case, and most memory above what the process had before."""
STUCK, STARTING = 30.0, 300.0
"""Seconds without a new case after which a process hangs; the first needs its preparation."""


class Target(NamedTuple):
    """A parser, and what it accepts."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    words: Sequence[bytes] = ()
    """Pieces that its format is made of."""
    repaired: Callable[[Random, bytes], bytes] = lambda draw, content: content
    """Corrects checksums and lengths, so that what is behind them is reached."""


def campaign(home: Path, seed: int, *, seconds: float = 300.0) -> Iterator[Case]:
    """Fuzz one target after the other for `seconds` in all."""
    from torture.fuzz_targets import TARGETS  # here: it imports what is fuzzed

    for name, prepare in TARGETS.items():
        place = home / name
        place.mkdir()
        cases, findings = _fuzz(name, prepare, place, seconds / len(TARGETS), seed)
        yield Case(f"{name}: {cases:,} cases", False, seconds / len(TARGETS), findings)


def _fuzz(
    name: str, prepare: Callable[[Path], Target], home: Path, seconds: float, seed: int
) -> tuple[int, list[str]]:
    context = multiprocessing.get_context("spawn")
    state, keep = context.Value("l", 0), FINDINGS.absolute()
    process = context.Process(target=_work, args=(name, prepare, home, seed, state, keep))
    process.start()
    began, cases, changed = 0.0, 0, time.monotonic()
    while process.is_alive() and not (began and time.monotonic() - began > seconds):
        time.sleep(0.1)
        if state.value != cases:
            began, cases, changed = began or time.monotonic(), state.value, time.monotonic()
        elif time.monotonic() - changed > (STUCK if cases else STARTING):
            _keep(keep, name, "hangs", (home / "case").read_bytes(), "")
            break
    if not process.is_alive():
        _keep(keep, name, f"died with {process.exitcode}", (home / "case").read_bytes(), "")
    process.kill()
    process.join()
    return cases, [file.read_text().splitlines()[0] for file in keep.glob(f"{name}-*.txt")]


def _work(
    name: str, prepare: Callable[[Path], Target], home: Path, seed: int, state: Any, keep: Path
) -> None:
    """Try one case after the other, until killed."""
    warnings.simplefilter("ignore")
    (home / "case").touch()
    target = prepare(home)
    draw, seeds, answers = Random(seed), list(target.seeds), set[str]()
    for content in seeds:  # or the fuzzing starts from what is refused anyway
        target.read(content)
    held = _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (held + 2 * 2**30, held + 2 * 2**30))
    while True:
        content = target.repaired(draw, mutated(draw, seeds, target.words))
        (home / "case").write_bytes(content)
        state.value += 1
        answer = _tried(name, target, content, keep)
        if answer not in answers and len(seeds) < 500:
            answers.add(answer)
            seeds.append(content)


def _tried(name: str, target: Target, content: bytes, keep: Path) -> str:
    """Read one case; return its answer without numbers."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began, answer = _status("VmRSS"), time.process_time(), "read"
    try:
        target.read(content)
    except NofussError as error:
        answer = str(error)
        if "\n" in answer:
            _keep(keep, name, f"two lines: {answer!r}", content, answer)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "/nofuss/" in f.filename), frames[-1])
        answer = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        _keep(keep, name, answer, content, traceback.format_exc())
    seconds = time.process_time() - began
    megabytes = (_status("VmHWM") - before) / 2**20
    for unit, value, most in (("s", seconds, SECONDS), ("MB", megabytes, MEGABYTES)):
        if value > most:
            _keep(keep, name, f"over {most:.0f} {unit}", content, f"{value:.1f} {unit}: {answer}")
    return re.sub(r"[0-9]+", "0", answer)[:200]


def _status(field: str) -> int:
    """Return a field of this process's memory, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def _keep(keep: Path, name: str, what: str, content: bytes, text: str) -> None:
    """Write a finding once, with its bytes beside it."""
    key = sha256(what.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    file = keep / f"{name}-{key}.txt"
    if not file.exists():
        keep.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".case").write_bytes(content)
        file.write_text(f"{what} ({file.with_suffix('.case')})\n{text}", errors="backslashreplace")
