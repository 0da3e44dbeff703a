"""The processes that decode for the page: answers, limits, and being given up."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode_resized
from nofuss.files.parts import Part, part_path
from nofuss.model.encoder import load
from nofuss.search import decoders
from nofuss.search.decoders import Decoders, Seen
from tests.tiny_run import draw
from torture.attack_server import SLOW
from torture.picture_files import png, saved

FIT = Preprocessing(size=24, resize=32)


def use(work: Callable[[Decoders], Awaitable[object]]) -> None:
    async def main() -> None:
        pool = Decoders()
        try:
            await work(pool)
        finally:
            await pool.stop()
            await asyncio.sleep(0.1)  # transports say goodbye

    asyncio.run(main())


def test_the_same_pixels_as_in_this_process(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    content = saved(Image.fromarray(noise), "PNG")
    (tmp_path / "a.png").write_bytes(content)

    async def work(pool: Decoders) -> None:
        seen = await pool.decode(content, side=224, fit=FIT)
        assert seen.pixels is not None
        np.testing.assert_array_equal(seen.pixels, decode_resized(tmp_path / "a.png", FIT))
        shown = await pool.decode(tmp_path / "a.png", side=224)
        assert shown == Seen(None, seen.content, "image/jpeg")
        with pytest.raises(PictureError, match="not a picture"):
            await pool.decode(b"rubbish", side=224, fit=FIT)
        with pytest.raises(PictureError, match="too narrow"):
            await pool.decode(png(2_000, 1), side=224, fit=FIT)
        assert len(pool._all) == 1  # errors cost no process

    use(work)


@pytest.mark.parametrize("resize", [32, 110, 300])
@pytest.mark.parametrize("size", [(1000, 700), (300, 260), (120, 2000)])
def test_a_jpeg_is_embedded_at_the_same_scale_as_in_this_process(
    tmp_path: Path, resize: int, size: tuple[int, int]
) -> None:
    """JPEGs are decoded at reduced scale; what the thumbnail needs must not change it."""
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (tmp_path / "a.jpg").write_bytes(saved(Image.fromarray(noise), "JPEG"))
    fit = Preprocessing(size=resize, resize=resize)

    async def work(pool: Decoders) -> None:
        seen = await pool.decode((tmp_path / "a.jpg").read_bytes(), side=224, fit=fit)
        assert seen.pixels is not None
        np.testing.assert_array_equal(seen.pixels, decode_resized(tmp_path / "a.jpg", fit))
        shown = await pool.decode(tmp_path / "a.jpg", side=224)
        with Image.open(io.BytesIO(seen.content)) as a, Image.open(io.BytesIO(shown.content)) as b:
            assert a.size == b.size  # the thumbnail is as large as without pixels

    use(work)


def test_the_page_embeds_a_large_jpeg_as_search_does(picture_run: Path, tmp_path: Path) -> None:
    draw(1, 5, side=900).save(tmp_path / "a.jpg")
    encoder = load(picture_run)
    assert encoder.preprocessing is not None
    assert encoder.preprocessing.resize < 224

    async def work(pool: Decoders) -> None:
        content = (tmp_path / "a.jpg").read_bytes()
        seen = await pool.decode(content, side=224, fit=encoder.preprocessing)
        assert torch.equal(encoder.embed([seen.pixels]), encoder.embed([tmp_path / "a.jpg"]))

    use(work)


def test_pictures_inside_files(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    content = saved(Image.fromarray(noise), "PNG")
    (tmp_path / "a.tar").write_bytes(bytes(512) + content)
    inside = [part_path(Part(tmp_path / "a.tar", 512, len(content)), "a.png")]
    with suppress(ImportError):  # pyarrow is an extra
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"image": [content]}), tmp_path / "a.parquet")
        inside.append(part_path(Part(tmp_path / "a.parquet", 0), "a.png"))

    async def work(pool: Decoders) -> None:
        expected = await pool.decode(content, side=224)
        for path in inside:
            assert await pool.decode(path, side=224) == expected
            (path.parents[1]).write_bytes(b"gone")
            with pytest.raises(PictureError, match="unreadable"):
                await pool.decode(path, side=224)
        assert len(pool._all) == 1

    use(work)


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: Decoders) -> None:
        await pool.start()
        (process,) = pool._all
        monkeypatch.setattr(decoders, "SECONDS", 0.05)
        with pytest.raises(PictureError, match="too slow"):
            await pool.decode(SLOW, side=224, fit=FIT)
        assert await process.wait() != 0
        monkeypatch.setattr(decoders, "SECONDS", 60.0)
        assert (await pool.decode(png(9, 9), side=224)).media == "image/png"

    use(work)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
def test_a_process_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, as by a disk that does not answer: neither the picture nor the end waits for it."""
    monkeypatch.setattr(decoders, "SECONDS", 0.1)
    monkeypatch.setattr(decoders, "_kill", lambda process: None)

    async def work(pool: Decoders) -> None:
        await pool.start()
        (process,) = pool._all
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(PictureError, match="too slow"):
                await pool.decode(png(9, 9), side=224)
            began = time.monotonic()
            await pool.stop()
            assert time.monotonic() - began < 30
        finally:
            process.kill()
            await process.wait()

    use(work)


def test_what_nobody_waits_for_is_ended() -> None:
    async def work(pool: Decoders) -> None:
        await pool.start()
        (process,) = pool._all
        waiting = asyncio.create_task(pool.decode(SLOW, side=224, fit=FIT))
        await asyncio.sleep(0.05)
        waiting.cancel()
        assert await process.wait() != 0

    use(work)


def test_a_decoder_that_dies_is_one_line() -> None:
    async def work(pool: Decoders) -> None:
        await pool.start()
        pool._all[0].kill()
        with pytest.raises(PictureError, match="its decoder ended"):
            await pool.decode(png(9, 9), side=224)
        await pool.decode(png(9, 9), side=224)

    use(work)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_memory_files_and_time_are_limited(tmp_path: Path) -> None:
    def under_limits(code: str) -> subprocess.CompletedProcess[str]:
        start = "from nofuss.data import limited\nlimited._limit_memory()\n"
        return subprocess.run(
            [sys.executable, "-c", start + code], capture_output=True, text=True, cwd=tmp_path
        )

    assert under_limits("bytearray(200_000_000)").returncode == 0
    assert "MemoryError" in under_limits("bytearray(400_000_000)").stderr
    assert under_limits("open('x', 'w').write('x' * 9999)").returncode != 0
    endless = under_limits("limited.SECONDS = 0\nlimited._limit_time()\nwhile True: pass")
    assert endless.returncode < 0


def test_a_folder_of_pictures_is_no_place_for_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIL", "nofuss", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('sprung', 'w')")
    monkeypatch.chdir(tmp_path)
    use(lambda pool: pool.decode(png(9, 9), side=224))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="special files of Linux")
def test_a_pipe_does_not_hang_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")

    async def work(pool: Decoders) -> None:
        began = time.monotonic()
        with pytest.raises(PictureError):
            await pool.decode(tmp_path / "pipe.png", side=224)
        assert time.monotonic() - began < 60

    use(work)
