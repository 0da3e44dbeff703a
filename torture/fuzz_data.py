"""Parsers of data: pictures, tables, arrays, folders of published data sets."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, features
from safetensors.torch import save_file

from nofuss.config import Preprocessing
from nofuss.data.decode import decode, resized
from nofuss.data.items import read_item
from nofuss.data.open import open_data
from torture.bombs import saved
from torture.fuzz import Target

MOST_READ = 20
"""Pictures of a collection that are read after it was opened."""


# Pictures


def _pixels(mode: str, side: int = 40) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (side, side, 4), dtype=np.uint8)
    values[: side // 2] = 200  # so that decoders meet runs too
    return Image.fromarray(values, "RGBA").convert(mode)


def _pictures() -> list[bytes]:
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        *(("PNG", mode, {}) for mode in ("L", "RGB", "RGBA", "P", "1", "LA")),
        *(("JPEG", mode, {"progressive": p}) for mode in ("L", "RGB", "CMYK") for p in (0, 1)),
        *(("GIF", "P", {}), ("BMP", "RGB", {}), ("BMP", "P", {}), ("BMP", "1", {})),
        *(("WEBP", "RGB", {}), ("WEBP", "RGBA", {"lossless": True})),
        *(("TIFF", "RGB", {"compression": c}) for c in (None, "tiff_lzw", "jpeg", "packbits")),
        *(("TIFF", "L", {"compression": "tiff_adobe_deflate"}), ("TIFF", "1", {})),
    ]
    made = [saved(_pixels(mode), kind, **options) for kind, mode, options in kinds]
    frames = [_pixels("RGB"), _pixels("RGB").rotate(90)]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        made.append(saved(frames[0], kind, save_all=True, append_images=frames[1:]))
    made.append(saved(Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40)), "PNG"))
    exif = Image.Exif()
    exif[0x0112] = 6
    made += [saved(_pixels("RGB"), kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP")]
    if features.check("avif"):
        made += [saved(_pixels(mode), "AVIF") for mode in ("RGB", "RGBA")]
    if find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
        made.append(saved(_pixels("RGB"), "HEIF"))
    return made


def pictures(home: Path) -> Target:
    """Decode and resize a picture."""
    file = home / "picture"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        image = decode(file, at_least=len(content) % 2 * 24)
        resized(image, Preprocessing(24, 24))

    words: tuple[bytes, ...] = (
        b"IHDR",
        b"IDAT",
        b"PLTE",
        b"tRNS",
        b"acTL",
        b"fcTL",
        b"eXIf",
        b"\xff\xda",
        b"\xff\xc4",
    )
    words += (b"\xff\xe1", b"Exif\0\0", b"VP8L", b"VP8X", b"ANMF", b"ALPH", b"GIF89a", b"BM")
    words += (b"iloc", b"iinf", b"infe", b"av01", b"ispe", b"grid", b"idat", b"meta", b"moov")
    return Target(_pictures(), read, words, _repaired_png)


def _repaired_png(draw: Random, content: bytes) -> bytes:
    """Correct the checksums of a PNG, most of the time."""
    if not content.startswith(b"\x89PNG") or draw.random() < 0.2:
        return content
    whole, at = bytearray(content), 8
    while at + 12 <= len(whole):
        (size,) = struct.unpack_from(">I", whole, at)
        if at + 12 + size > len(whole):
            break
        end = at + 8 + size
        struct.pack_into(">I", whole, end, zlib.crc32(whole[at + 4 : end]))
        at = end + 4
    return bytes(whole)


# Collections


def _opened(file: Path) -> None:
    """Open data and read some of its pictures; those that can't be read are reported later."""
    data = open_data(file)
    if data.array is not None:
        assert np.isfinite(np.asarray(data.array)).all()
    for path in data.paths[:MOST_READ]:
        try:
            read_item(path, limit=2**24)
        except OSError as error:
            if not error.strerror:
                raise


def tables(home: Path) -> Target:
    """Open a CSV of pictures, of triplets or of pairs."""
    for name in "abcd":
        _pixels("RGB", 8).save(home / f"{name}.png")
    os.mkfifo(home / "pipe")

    def read(content: bytes) -> None:
        file = home / ("x.tsv" if b"\t" in content[:200] else "x.csv")
        file.write_bytes(content)
        _opened(file)

    rows = ["a.png,x,train,12.5,2024-05-01", "b.png,y,test,7,", "c.png,y,test,,2024-05-02T10:00"]
    seeds = ["\n".join(["path,label,split,price,day", *rows])]
    seeds += ["anchor,positive,negative\na.png,b.png,c.png\nb.png,c.png,d.png\n"]
    seeds += ["a,b,same\na.png,b.png,1\nc.png,d.png,0\n", "path\tlabel\na.png\tx\nb.png\ty\n"]
    words = (b"pipe", b"/dev/zero", b'"', b'""', b"\r\n", b",", b"..", b"\0", b"\xff\xfe", b"label")
    return Target([s.encode() for s in seeds], read, (*words, b"x" * 300, b"\x1b[31m"))


def arrays(home: Path) -> Target:
    """Open vectors and labels in an .npz or .safetensors file."""
    whole = {"vectors": torch.randn(8, 4), "labels": torch.arange(8) // 2}
    others = whole | {"triplets": torch.tensor([[0, 1, 2], [2, 3, 4]]), "X": torch.ones(8, 3, 3, 3)}
    seeds = []
    for tensors in (whole, others):
        with io.BytesIO() as zipped:
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            np.savez(zipped, allow_pickle=False, **arrays)
            seeds.append(zipped.getvalue())
        save_file(tensors, home / "x.safetensors")
        seeds.append((home / "x.safetensors").read_bytes())

    def read(content: bytes) -> None:
        file = home / ("x.npz" if content.startswith(b"PK") else "x.safetensors")
        file.write_bytes(content)
        _opened(file)

    words = (b"F32", b"I64", b"BF16", b"'descr': '|O'", b"'<f8'", b"'<U9999999'", b"True", b"shape")
    return Target(seeds, read, words)


def _of_files(folder: Path, names: tuple[str, ...], read_all: Callable[[], object]) -> Target:
    """Return a target that replaces one file of a folder; the first byte says which."""
    whole = [(folder / name).read_bytes() for name in names]

    def read(content: bytes) -> None:
        number = (content[0] if content else 0) % len(names)
        (folder / names[number]).write_bytes(content[1:])
        try:
            read_all()
        finally:
            (folder / names[number]).write_bytes(whole[number])

    seeds = [bytes([number]) + content for number, content in enumerate(whole)]
    return Target(seeds, read, (b"../", b"null", b"[]", b"{}", b"1e999", b"\\u0000", b"true"))


CUB = {
    "images.txt": b"1 a/a.png\n2 b/b.png\n",
    "image_class_labels.txt": b"1 1\n2 2\n",
    "classes.txt": b"1 robin\n2 wren\n",
}
PRODUCTS = {
    "Ebay_train.txt": b"image_id class_id super_class_id path\n1 1 1 a/a.png\n",
    "Ebay_test.txt": b"image_id class_id super_class_id path\n2 2 1 b/b.png\n",
}


def benchmarks(home: Path, layout: dict[str, bytes]) -> Target:
    """Open the folder of a published data set."""
    for name in "ab":
        for folder in (home, home / "images"):
            (folder / name).mkdir(parents=True)
            _pixels("RGB", 8).save(folder / name / f"{name}.png")
    for name, content in layout.items():
        (home / name).write_bytes(content)
    return _of_files(home, tuple(layout), lambda: _opened(home))
