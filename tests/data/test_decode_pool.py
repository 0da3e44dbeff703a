"""The processes that decode for the page: answers, limits, and what happens when one ends."""

import gc
import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data import decode_pool
from nofuss.data.decode import PictureError, decode_resized
from nofuss.data.decode_pool import Decoded, DecodePool
from torture.bombs import BOMBS, png, saved

FIT = Preprocessing(size=24, resize=32)
SMALL = png(9, 9)
SLOW = BOMBS["JPEG, 2,500 scans"]


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    """A pool of one process, which is started again where a test ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_pool, "PROCESSES", 1)
        patch.setattr(decode_pool, "SECONDS", 60.0)  # for a busy machine
        pool = DecodePool()
        yield pool
        pool.close()


def test_a_decoder_loads_no_torch() -> None:
    """Which takes 0.8 seconds to start and 190 MB."""
    code = "import sys, nofuss.data.decode_pool; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def fresh(pool: DecodePool) -> Iterator[DecodePool]:
    """One whose process is not started yet."""
    fresh = DecodePool()
    yield fresh
    fresh.close()


def process_of(pool: DecodePool) -> "subprocess.Popen[bytes]":
    process = pool._workers[0].process
    assert process is not None
    return process


def noise(height: int, width: int) -> Image.Image:
    random = np.random.default_rng(0)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.slow
def test_the_same_pixels_as_in_this_process(pool: DecodePool) -> None:
    content = saved(noise(50, 70), "PNG")
    decoded = pool.decode(content, side=224, fits=[FIT])
    np.testing.assert_array_equal(decoded.pixels, [decode_resized(content, FIT)])
    assert pool.decode(content, side=224) == Decoded((), decoded.content, "image/jpeg")
    other = Preprocessing(size=20, resize=40)
    both = pool.decode(content, side=224, fits=[FIT, other]).pixels
    for pixels, fit in zip(both, (FIT, other), strict=True):
        np.testing.assert_array_equal(pixels, decode_resized(content, fit))


@pytest.mark.slow
def test_a_jpeg_is_embedded_at_the_same_scale_as_in_this_process(pool: DecodePool) -> None:
    """JPEGs are decoded at reduced scale; what the thumbnail needs must not change it."""
    for size, resize in product([(1000, 700), (300, 260), (120, 2000)], [32, 110, 300]):
        content, fit = saved(noise(*size), "JPEG"), Preprocessing(size=resize, resize=resize)
        decoded, shown = (pool.decode(content, side=224, fits=fits) for fits in ([fit], []))
        np.testing.assert_array_equal(decoded.pixels, [decode_resized(content, fit)])
        sides = [Image.open(io.BytesIO(each.content)).size for each in (decoded, shown)]
        assert sides[0] == sides[1], "the thumbnail is as large as without pixels"


@pytest.mark.slow
def test_errors_cost_no_process(pool: DecodePool) -> None:
    pool.decode(SMALL, side=224)
    process = process_of(pool)
    with pytest.raises(PictureError, match="not a picture"):
        pool.decode(b"rubbish", side=224, fits=[FIT])
    with pytest.raises(PictureError, match="too narrow"):
        pool.decode(png(2_000, 1), side=224, fits=[FIT])
    pool.decode(SMALL, side=224)
    assert process_of(pool) is process


@pytest.mark.slow
def test_what_takes_too_long_is_killed(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.decode(SMALL, side=224)
    process = process_of(pool)
    monkeypatch.setattr(decode_pool, "SECONDS", 0.05)
    with pytest.raises(PictureError, match="too slow"):
        pool.decode(SLOW(), side=224, fits=[FIT])
    assert process.returncode == -9
    monkeypatch.setattr(decode_pool, "SECONDS", 60.0)
    assert pool.decode(SMALL, side=224).media == "image/png"


@pytest.mark.slow
def test_a_process_that_reads_nothing_is_killed(
    pool: DecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe is full long before the picture is sent."""
    pool.decode(SMALL, side=224)
    process_of(pool).send_signal(signal.SIGSTOP)
    monkeypatch.setattr(decode_pool, "SECONDS", 0.1)
    with pytest.raises(PictureError, match="too slow"):
        pool.decode(bytes(10**7), side=224)


@pytest.mark.slow
def test_closing_ends_a_process_at_work(fresh: DecodePool) -> None:
    fresh.decode(SMALL, side=224)
    process, errors = process_of(fresh), list[PictureError]()

    def decode_slowly() -> None:
        try:
            fresh.decode(SLOW(), side=224)
        except PictureError as error:
            errors.append(error)

    thread = threading.Thread(target=decode_slowly)
    thread.start()
    while not fresh._idle.empty():  # until it has begun
        time.sleep(0.01)
    fresh.close()
    thread.join()
    assert [error.detail for error in errors] == ["its decoder ended"]
    assert process.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "b'[' * 60_000",
        "b'null'",
        "b'x' * 10**6",
        "b'{\"error\": 1}'",
        'b\'{"shape": [9, 9], "media": ""}\'',
        "pickle.dumps(print)",
    ],
)
def test_whatever_a_process_answers_is_one_line(
    fresh: DecodePool, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its picture may control it."""
    code = (
        "import pickle, sys; from multiprocessing.connection import Connection; "
        "pipe = Connection(int(sys.argv[1])); pipe.send_bytes(b'ready'); pipe.recv_bytes(); "
        f"pipe.recv_bytes(); [pipe.send_bytes({answer}) for _ in range(3)]; pipe.recv_bytes()"
    )
    start = subprocess.Popen

    def hostile(words: list[str], **options: object) -> "subprocess.Popen[bytes]":
        descriptor = words[-1].rpartition("(")[2].rstrip(")")
        return start([sys.executable, "-c", code, descriptor], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", hostile)
    with pytest.raises(PictureError, match="its decoder ended"):
        fresh.decode(SMALL, side=224, fits=[FIT])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_and_files_are_limited(tmp_path: Path) -> None:
    script = """
from nofuss.data import decode_pool
decode_pool._limit()
bytearray(200_000_000)
try:
    bytearray(400_000_000)
except MemoryError:
    print("too large", flush=True)
open("x", "w").write("x" * 9999)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "too large\n"
    assert done.returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_what_takes_too_much_memory_is_refused(pool: DecodePool) -> None:
    pool.decode(SMALL, side=224)
    process = process_of(pool)
    with pytest.raises(PictureError, match="out of memory"):
        pool.decode(BOMBS["PNG, palette with transparency"](), side=224)
    pool.decode(SMALL, side=224)
    assert process_of(pool) is process


@pytest.mark.slow
def test_a_folder_of_pictures_is_no_place_for_code(
    fresh: DecodePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIL", "nofuss", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('sprung', 'w')")
    monkeypatch.chdir(tmp_path)
    fresh.decode(SMALL, side=224)
    assert not (tmp_path / "sprung").exists()


def test_a_pool_that_nobody_closed_leaves_no_process() -> None:
    pool = DecodePool()
    pool.start()
    processes = [worker.process for worker in pool._workers]
    assert all(process is not None and process.poll() is None for process in processes)
    del pool
    gc.collect()
    assert all(process is not None and process.returncode is not None for process in processes)


@pytest.mark.slow
def test_a_process_that_died_between_two_pictures_costs_neither(pool: DecodePool) -> None:
    pool.decode(SMALL, side=224)
    process = process_of(pool)
    process.kill()
    process.wait()
    pool.decode(SMALL, side=224)
    assert process_of(pool) is not process
