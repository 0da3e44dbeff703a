"""Upload every bomb of the catalogue to a real page, while an honest client uses it.

Each must be answered within SECONDS, by a decoder that takes at most MEGABYTES above an idle one;
meanwhile other requests are answered, and afterwards honest pictures.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torture.bombs import BOMBS
from torture.measured import Case
from torture.served import Served, children, honest, prepare_run, served

SECONDS, MEGABYTES = 6.0, 300.0


def campaign(home: Path, seed: int) -> Iterator[Case]:
    """Upload bombs one by one, then ask as an honest client."""
    with served(home, prepare_run(home)) as server:
        honest(server)
        idle = decoder_megabytes(server)
        for name in BOMBS:
            case = upload(server, name, idle)
            late = [f"answered after {case.seconds:.1f} s"] * (case.seconds > SECONDS)
            yield case._replace(complaints=case.complaints + late)
        yield Case("honest pictures afterwards", False, 0.0, 0.0, honest(server))


def upload(server: Served, name: str, idle: float) -> Case:
    """Upload one bomb; measure its decoder, and ask for other things until it is answered."""
    content, complaints, peak = BOMBS[name](), list[str](), 0.0
    for pid in children(server.process.pid):
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak counts from here
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_ask, server, "/api/search", content)
        while True:
            is_done = answer.done()
            peak = max(peak, decoder_megabytes(server))
            if is_done:
                break
            status, said, _ = _ask(server, f"/api/search?item={server.keys[0]}")
            if status != 200:
                complaints.append(f"meanwhile a search got {status} {said[:80]!r}")
            time.sleep(0.02)
    status, said, seconds = answer.result()
    if status not in (200, 415, 422):
        complaints.append(f"{status} {said[:100]!r}")
    if peak - idle > MEGABYTES:
        complaints.append(f"{peak - idle:.0f} MB")
    words = "" if status == 200 else f": {said.decode(errors='replace')}"
    return Case(f"{name}: {status}{words}", status != 200, seconds, peak - idle, complaints)


def _ask(server: Served, path: str, body: bytes | None = None) -> tuple[int, bytes, float]:
    """Return status, answer and seconds; status 0 if there is no answer."""
    began = time.monotonic()
    try:
        status, said = server.ask(path, body)
    except OSError as error:
        status, said = 0, str(error).encode()
    return status, said, time.monotonic() - began


def decoder_megabytes(server: Served) -> float:
    """Return the peak memory of the largest decoder."""
    peaks = [0]
    for pid in children(server.process.pid):
        with suppress(OSError):
            process = Path(f"/proc/{pid}")
            if b"decode_pool" in (process / "cmdline").read_bytes():  # else just forked
                status = (process / "status").read_text()
                peaks += map(int, re.findall(r"VmHWM:\s*(\d+) kB", status))
    return max(peaks) / 1024
