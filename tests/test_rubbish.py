"""Rubbish in: what `nofuss train` says to it, and how it ends. User data stay as they are."""

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nofuss.cli import main
from torture.bombs import png

CATALOGUE: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {}
"""Name → how to make the rubbish among photos, what is trained on, exit code, what is said."""


def rubbish(
    name: str, said: str, *, code: int = 0, data: tuple[str, ...] = ("photos",)
) -> Callable[[Callable[[Path], object]], None]:
    def enter(make: Callable[[Path], object]) -> None:
        CATALOGUE[name] = make, [*data], code, said

    return enter


def picture(seed: int, *, side: int = 20) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))


@rubbish("link loops, empty folders", "broken links")
def _(photos: Path) -> None:
    (photos / "class 0" / "up").symlink_to(photos)
    (photos / "class 0" / "me.png").symlink_to("me.png")
    (photos / "nobody").mkdir()


@rubbish("a shard of links", "links", code=2, data=("links.tar",))
def _(photos: Path) -> None:
    with tarfile.open(photos.parent / "links.tar", "w") as shard:
        link = tarfile.TarInfo("a/0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/dev/zero"
        shard.addfile(link)


@rubbish("names in unicode, with a newline, not in UTF-8", "Recall@1")
def _(photos: Path) -> None:
    for c, name in enumerate(["ü★", "two\nlines", os.fsdecode(b"\xff\xfe"), "-rf"]):
        (photos / f"class {c}" / "0.png").rename(photos / f"class {c}" / f"{name}.png")
        (photos / f"class {c}").rename(photos / name)


@rubbish("no pictures", "4 left out")
def _(photos: Path) -> None:
    folder = photos / "class 0"
    picture(99, side=60).save(folder / "x.jpg")
    (folder / "x.jpg").write_bytes((folder / "x.jpg").read_bytes()[:2000])
    (folder / "x.png").symlink_to("/proc/self/mem")  # fails to be read; it is not even tried
    (folder / "y.jpg").write_text("no picture")
    (folder / "z.png").write_bytes(png(14_000, 14_000, depth=1, color=0))


@rubbish("nothing but rubbish", "photos", code=2)
def _(photos: Path) -> None:
    for file in photos.rglob("*.png"):
        file.write_bytes(b"")


@rubbish("odd formats", "19 images")
def _(photos: Path) -> None:
    folder, sound = photos / "class 0", picture(50)
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


@rubbish("copies with other labels", "2 duplicate")
def _(photos: Path) -> None:
    shutil.copy(photos / "class 0" / "0.png", photos / "class 1" / "copy.png")


@rubbish("labels with gaps", "labels 0…49 renumbered to 0…7", data=("x.npz",))
def _(photos: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 6))
    np.savez(photos.parent / "x.npz", vectors=vectors, labels=np.arange(40) // 5 * 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_rubbish(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setenv("COLUMNS", "100")
    for c in range(4):
        (tmp_path / "photos" / f"class {c}").mkdir(parents=True)
        for i in range(3):
            picture(10 * c + i).save(tmp_path / "photos" / f"class {c}" / f"{i}.png")
    make, words, expected, line = CATALOGUE[name]
    make(tmp_path / "photos")
    files = (p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink())
    before = {p: p.read_bytes() for p in files}
    code = main(["train", *words, "--epochs", "1", "--dim", "4", "--out", "run"])
    out, err = capsys.readouterr()
    assert code == expected, err
    assert line in (out if expected == 0 else err)
    if code:
        assert len(err.strip().splitlines()) == 1
        assert err.startswith("nofuss: ")
        assert "unexpected" not in err
    assert {p: p.read_bytes() for p in before} == before
