"""Pictures of characters in the typefaces of font files, drawn in several processes and cached.

Shared by the two data sets of characters: `glyphs.py` (built in) and `han.py` (optional).
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFont

from nofuss.cache import blob
from nofuss.errors import DataError

Pixels = NDArray[np.uint8]
"""(N, side, side), white on black."""
Arrays = dict[str, NDArray[Any]]
STRIP = 16000
"""Characters that one process draws."""


def codes_in(file: Path) -> set[int]:
    """Return the characters in the character map of a font file; of a collection, its first."""
    from matplotlib.ft2font import FT2Font

    return set(FT2Font(str(file)).get_charmap())


def draw(file: Path, codes: Sequence[int], *, side: int, size: int) -> Pixels:
    """Draw characters with `size` pixels per em, smaller where they would not fit, ink centred."""
    fonts: dict[int, ImageFont.FreeTypeFont] = {}
    pictures = np.zeros((len(codes), side, side), dtype=np.uint8)
    for i, code in enumerate(codes):
        for em in range(size, 0, -1):  # the few widest letters need a smaller size
            if em not in fonts:
                basic = ImageFont.Layout.BASIC  # the same with and without libraqm
                fonts[em] = ImageFont.truetype(file, em, layout_engine=basic)
            mask = fonts[em].getmask(chr(code), mode="L", anchor="ls")
            width, height = mask.size
            if max(width, height) <= side:
                break
        left, top = (side - width) // 2, (side - height) // 2
        ink = np.frombuffer(bytes(mask), dtype=np.uint8).reshape(height, width)
        pictures[i, top : top + height, left : left + width] = ink
    return pictures


def draw_in_processes(
    jobs: Sequence[tuple[Path, Sequence[int]]], *, side: int, size: int
) -> list[Pixels]:
    """Draw the characters of each font file; Pillow draws one at a time in a process."""
    strips = [
        (i, file, codes[at : at + STRIP])
        for i, (file, codes) in enumerate(jobs)
        for at in range(0, len(codes), STRIP)
    ]

    def draw_strip(strip: tuple[int, Path, Sequence[int]]) -> Pixels:
        _, file, codes = strip
        job = {"file": str(file), "codes": list(map(int, codes)), "side": side, "size": size}
        # Not multiprocessing, which would run an unguarded script of the caller a second time.
        # -P: the folder it is called in may hold a PIL.py.
        command = [sys.executable, "-P", "-m", "nofuss.data.typefaces"]
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            command,
            input=json.dumps(job).encode(),
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=False,
        )
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines()
            raise DataError(f"{file} can't be drawn: {reason[-1] if reason else done.returncode}")
        return np.frombuffer(done.stdout, dtype=np.uint8).reshape(-1, side, side)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        drawn = list(pool.map(draw_strip, strips))
    blank = np.zeros((0, side, side), dtype=np.uint8)
    return [
        np.concatenate(
            [blank, *(d for d, strip in zip(drawn, strips, strict=True) if strip[0] == i)]
        )
        for i in range(len(jobs))
    ]


def cached_or(name: str, render: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of this name in the cache, or render and keep them."""

    def packed() -> bytes:
        with io.BytesIO() as file:
            np.savez_compressed(file, allow_pickle=False, **render())
            return file.getvalue()

    with np.load(io.BytesIO(blob(name, packed)), allow_pickle=False) as arrays:
        return dict(arrays)


def main() -> None:
    """Draw what standard input asks for; write its pixels to standard output."""
    job = json.load(sys.stdin)
    pictures = draw(Path(job["file"]), job["codes"], side=job["side"], size=job["size"])
    sys.stdout.buffer.write(pictures.tobytes())


if __name__ == "__main__":
    main()
