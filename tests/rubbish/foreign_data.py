"""Folders, pictures, tables and arrays that are not what they should be."""

import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.rubbish.catalogue import CATALOGUE, Make, arrays, photos, picture, rubbish, table, train

# Folders


@rubbish("missing folder", 2, "does not exist; expected a folder of class folders")
def _(here: Path) -> list[object]:
    return train(here / "none")


@rubbish("empty folder", 2, "holds no pictures; expected a folder of class folders")
def _(here: Path) -> list[object]:
    (here / "photos").mkdir()
    return train(here / "photos")


@rubbish("a folder that links to itself", 2, "holds no pictures")
def _(here: Path) -> list[object]:
    (here / "photos").mkdir()
    (here / "photos" / "again").symlink_to(here / "photos")
    (here / "photos" / "me").symlink_to("me")
    return train(here / "photos")


@rubbish("link loops among pictures", 0, "broken links and special files skipped")
def _(here: Path) -> list[object]:
    data = photos(here)
    (data / "class 0" / "up").symlink_to(data)
    (data / "class 0" / "me.png").symlink_to("me.png")
    return train(data)


@rubbish("pictures without class folders", 2, "holds 3 pictures but no class folders; put")
def _(here: Path) -> list[object]:
    return train(photos(here) / "class 0")


@rubbish("empty class", 0, "1 folders without pictures skipped")
def _(here: Path) -> list[object]:
    data = photos(here)
    (data / "nobody").mkdir()
    return train(data)


@rubbish("noise as a shard", 2, "noise.tar is not a readable tar file")
def _(here: Path) -> list[object]:
    (here / "noise.tar").write_bytes(b"\x07noise" * 1000)
    return train(here / "noise.tar")


@rubbish("a shard of links", 2, "links holds no pictures")
def _(here: Path) -> list[object]:
    with tarfile.open(here / "links.tar", "w") as shard:
        link = tarfile.TarInfo("a/0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/dev/zero"
        shard.addfile(link)
    return train(here / "links.tar")


@rubbish("a pattern that is none", 2, "--label-pattern ( is not a regular expression")
def _(here: Path) -> list[object]:
    return [*train(photos(here)), "--label-pattern", "("]


@rubbish("a level that is none", 2, "--class-level is 0; expected a number from 1 up")
def _(here: Path) -> list[object]:
    return [*train(photos(here)), "--class-level", 0]


@rubbish("classes in both splits", 2, "2 classes are in both train and test (a; b); keep each")
def _(here: Path) -> list[object]:
    for side in ("train", "test"):
        for name in ("a", "b"):
            (here / "photos" / side / name).mkdir(parents=True)
            picture(0).save(here / "photos" / side / name / "x.png")
    return train(here / "photos")


@rubbish("names in unicode, with a newline, and not in UTF-8", 0, "Recall@1")
def _(here: Path) -> list[object]:
    data = photos(here)
    for c, name in enumerate(["ü★", "two\nlines", os.fsdecode(b"\xff\xfe"), "-rf"]):
        (data / f"class {c}" / "0.png").rename(data / f"class {c}" / f"{name}.png")
        (data / f"class {c}").rename(data / name)
    data.rename(here / os.fsdecode(b"photos\xff\n"))
    return train(here / os.fsdecode(b"photos\xff\n"))


# Pictures


def among(make: Callable[[Path], object]) -> Make:
    """One file of rubbish among sound pictures."""

    def inner(here: Path) -> list[object]:
        data = photos(here)
        make(data / "class 0")
        return train(data)

    return inner


def truncated(folder: Path) -> None:
    picture(99, side=60).save(folder / "x.jpg")
    content = (folder / "x.jpg").read_bytes()
    (folder / "x.jpg").write_bytes(content[: len(content) // 2])


def bomb(folder: Path) -> None:
    """196 megapixels in 24 KB."""
    side = 14_000
    rows = zlib.compress(b"\0" * ((side // 8 + 1) * side), 9)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    assert len(png) < 25_000
    (folder / "bomb.png").write_bytes(png)


def odd_formats(here: Path) -> list[object]:
    """CMYK, 16 bits, palette, alpha, rotated by EXIF, animated, and a PNG that is called .jpg."""
    data = photos(here)
    folder, sound = data / "class 0", picture(50)
    sound.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 160).save(folder / "16.png")
    sound.quantize(7).save(folder / "palette.png")
    sound.convert("RGBA").rotate(30).save(folder / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(51).save(folder / "rotated.jpg", exif=exif)
    frames = [picture(i) for i in range(60, 63)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    picture(52).save(folder / "png.jpg", format="PNG")
    return train(data)


CATALOGUE |= {
    "truncated JPEG": (among(truncated), 0, "1 truncated; 1 left out"),
    "0-byte picture": (among(lambda d: (d / "x.png").touch()), 0, "1 empty file; 1 left out"),
    "wrong extension": (
        among(lambda d: (d / "x.jpg").write_text("no picture")),
        0,
        "1 not a picture; 1 left out",
    ),
    "24 KB PNG of 196 megapixels": (among(bomb), 0, "1 oversized; 1 left out"),
    "file without a size": (
        # Fails to be read, also for root: it is not even tried.
        among(lambda d: (d / "x.png").symlink_to("/proc/self/mem")),
        0,
        "1 empty file; 1 left out",
    ),
    "nothing but rubbish": (
        lambda here: [
            *among(lambda d: [p.write_bytes(b"") for p in d.parent.rglob("*.png")])(here)
        ],
        2,
        "no picture that can be read",
    ),
    "odd formats": (odd_formats, 0, "19 images"),
    "copies with other labels": (
        among(lambda d: shutil.copy(d / "0.png", d.parent / "class 1" / "copy.png")),
        0,
        "2 duplicate with another label",
    ),
}


# Tables


CATALOGUE |= {
    "CSV without a label column": (
        lambda here: table(here, "path,name", "photos/class 0/0.png,a"),
        2,
        "x.csv has the columns path, name; label missing, expected path,label[,split]",
    ),
    "CSV with bad rows": (
        lambda here: table(here, "path,label", "photos/class 0/0.png,", ",b"),
        2,
        "row 2: no label; row 3: no path",
    ),
    "CSV with missing files": (
        lambda here: table(here, "path,label", *(f"gone {i}.png,a" for i in range(7))),
        2,
        "row 2: no file gone 0.png; row 3: no file gone 1.png; row 4: no file gone 2.png; "
        "row 5: no file gone 3.png; row 6: no file gone 4.png; … (7 in all)",
    ),
    "triplets that name unknown files": (
        lambda here: table(
            here, "anchor,positive,negative", "photos/class 0/0.png,photos/class 0/1.png,gone.png"
        ),
        2,
        "row 2: no file gone.png",
    ),
    "empty CSV": (lambda here: table(here, ""), 2, "x.csv is empty"),
}


# Arrays


CATALOGUE |= {
    "labels with gaps": (
        lambda here: arrays(
            here,
            vectors=np.random.default_rng(0).normal(size=(40, 6)),
            labels=np.arange(40) // 5 * 7,
        ),
        0,
        "labels 0…49 renumbered to 0…7",
    ),
    "NaN in vectors": (
        lambda here: arrays(here, vectors=[[1.0, np.nan], [1, 2], [np.inf, 0]], labels=[0, 1, 0]),
        2,
        "vectors has NaN or infinite values in rows 0, 2; drop or fix them",
    ),
    "triplets of unknown rows": (
        lambda here: arrays(here, vectors=np.eye(3), triplets=[[0, 1, 2], [0, 1, 3]]),
        2,
        "triplets name items beyond 0…2 in rows 1",
    ),
    "arrays that need unpickling": (
        lambda here: arrays(here, vectors=np.array([{}, {}], dtype=object), labels=[0, 1]),
        2,
        "it holds Python objects; save labels as text: labels.astype(str)",
    ),
}
