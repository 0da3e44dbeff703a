"""Parsers of data: pictures, tables, arrays, shards, Parquet, folders of published data sets."""

import io
import json
import os
import struct
import tarfile
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
from nofuss.data.detect import open_data
from nofuss.files.atomic import read_regular
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
            read_regular(path, limit=2**24)
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


def _tar(kind: int, headers: dict[str, str] | None = None) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w", format=kind, pax_headers=headers) as shard:
            for number in range(3):
                members = {"png": saved(_pixels("L", 8), "PNG"), "cls": str(number % 2).encode()}
                members["json"] = json.dumps({"label": "robin"}).encode()
                for ending, content in members.items():
                    is_long = number == 2 and kind != tarfile.USTAR_FORMAT
                    info = tarfile.TarInfo(f"{'long' * 40 * is_long}a/{number:04}.{ending}")
                    info.size = len(content)
                    if kind == tarfile.PAX_FORMAT:
                        info.pax_headers = {"comment": "x", "mtime": "1.5"}
                    shard.addfile(info, io.BytesIO(content))
            for link in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
                info = tarfile.TarInfo(f"../../etc/{link.decode()}.png")
                info.type, info.linkname = link, "/etc/passwd"
                shard.addfile(info)
        return file.getvalue()


def shards(home: Path) -> Target:
    """Open a WebDataset shard and read its pictures."""
    seeds = [_tar(tarfile.USTAR_FORMAT), _tar(tarfile.GNU_FORMAT)]
    seeds += [_tar(tarfile.PAX_FORMAT), _tar(tarfile.PAX_FORMAT, {"a": "b"})]

    def read(content: bytes) -> None:
        (home / "x.tar").write_bytes(content)
        _opened(home / "x.tar")

    words = (b"\x80" + bytes(11), b"\xff" * 12, b"GNU.sparse.map=", b"GNU.sparse.major=1\n")
    sizes = (b"19 GNU.sparse.major=1\n", b"22 GNU.sparse.size=10\n", b"12 size=-512\n", b"S", b"L")
    names = (b"K", b"x", b"g", b"12 path=../x\n", b"20 hdrcharset=BINARY\n", b"ustar  \0")
    return Target(seeds, read, (*words, *sizes, *names), _repaired_tar)


def _repaired_tar(draw: Random, content: bytes) -> bytes:
    """Correct the checksums of the headers, most of the time."""
    if draw.random() < 0.1:
        return content
    whole = bytearray(content)
    for at in range(0, len(whole) - 511, 512):
        if whole[at + 257 : at + 262] == b"ustar":
            total = sum(whole[at : at + 148]) + 8 * 32 + sum(whole[at + 156 : at + 512])
            whole[at + 148 : at + 156] = f"{total:06o}\0 ".encode()
    return bytes(whole)


def _rows() -> Any:
    import pyarrow

    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    cells = [{"bytes": saved(_pixels("L", 8), "PNG"), "path": f"{i}.png"} for i in range(6)]
    columns = {"image": pyarrow.array(cells, image), "label": pyarrow.array([0, 1] * 3)}
    described = {"info": {"features": {"label": {"names": ["robin", "wren"]}}}}
    return pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(described)})


def parquet(home: Path) -> Target:
    """Open a Parquet file and read its pictures."""
    import pyarrow
    from pyarrow import parquet as pq

    named = pyarrow.table({"path": ["a.png"] * 4, "label": ["x", "x", "y", "y"]})
    _pixels("RGB", 8).save(home / "a.png")
    seeds = []
    for table in (_rows(), named, named.append_column("split", [["train", "test"] * 2])):
        for options in (
            {"compression": "none"},
            {"compression": "zstd"},
            {"use_dictionary": False},
        ):
            with io.BytesIO() as file:
                pq.write_table(table, file, row_group_size=3, **options)
                seeds.append(file.getvalue())

    def read(content: bytes) -> None:
        (home / "x.parquet").write_bytes(content)
        _opened(home / "x.parquet")

    return Target(seeds, read, (b"PAR1", b"huggingface", b"bytes", b"label", b"\x15", b"\x19"))


def saved_dataset(home: Path) -> Target:
    """Open what `datasets` saved to disk; the first byte says which of its files is changed."""
    import pyarrow

    (home / "d").mkdir()
    table, names = _rows(), ("state.json", "dataset_info.json", "data.arrow")
    with pyarrow.ipc.new_stream(home / "d" / "data.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (home / "d" / "state.json").write_text(json.dumps(state))
    features = {"label": {"names": ["robin", "wren"]}}
    (home / "d" / "dataset_info.json").write_text(json.dumps({"features": features}))
    return _of_files(home / "d", names, lambda: _opened(home / "d"))


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
