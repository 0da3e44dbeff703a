"""Pictures that are small to send and dear to open: refused, or decoded within bounds."""

import io
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from nofuss.config import Preprocessing
from nofuss.data import decode as decoding
from nofuss.data import transforms
from nofuss.data.cost import MAX_ASPECT, MAX_RESIZED, TooMuch
from nofuss.data.cost import middle_box as middle_of
from nofuss.data.decode import PictureError, decode, decode_resized, resized
from nofuss.data.detect import open_data
from nofuss.data.headers import count_chunks, count_scans, jpeg_blocks, tiff_layout
from nofuss.data.scan import scan_pictures
from nofuss.data.transforms import fitted, middle
from torture.bombs import bombs
from torture.picture_files import jpeg, png, saved, segment, tiff_picture, with_scans, zeros

BOMBS = bombs()
QUICK = [
    "PNG, 2,000 × 1",
    "PNG, RGBA",
    "PNG, 16 bits gray",
    "PNG, a million empty chunks",
    "PNG, tags over tags",
    "JPEG, 2,500 scans",
    "JPEG, millions of segments",
    "GIF, a comment a letter at a time",
    "WebP, moving and large",
    "WebP, a million chunks",
    "BMP, runs of one",
    *(name for name in BOMBS if name.startswith("AVIF")),
    "TIFF, a tile of 4 gigapixels",
    "TIFF, two million tiles of a pixel",
    "TIFF, strips over the same bytes",
    "TIFF, JPEG of 2,000 scans",
    "at the limit, PNG, 16 bits gray",
    "at the limit, WebP",
    *(name for name in BOMBS if name == "at the limit, AVIF"),
    "at the limit, TIFF",
    "at the limit, PNG, turned behind its pixels",
]
"""`make torture` tries them all."""
FIT = Preprocessing(size=56, resize=64)


def test_the_catalogue_is_large_and_covers_every_format() -> None:
    assert len(BOMBS) >= 40
    forms = {name.split(",")[0] for name in BOMBS}
    assert {"PNG", "JPEG", "GIF", "WebP", "BMP", "TIFF", "another format"} <= forms


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory with /proc")
@pytest.mark.parametrize("name", QUICK)
def test_a_bomb_stays_within_seconds_and_megabytes(name: str, tmp_path: Path) -> None:
    from torture.attack_pictures import defuse

    (tmp_path / "bomb").write_bytes(BOMBS[name]())
    case = defuse(name, tmp_path / "bomb")
    assert case.complaints == []
    assert case.refused or name.startswith("at the limit")


# ---- nearly a line


def test_the_scan_names_narrow_pictures_and_leaves_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOFUSS_CACHE", str(tmp_path / "cache"))
    for name, size in (("a/1", (2_000, 1)), ("a/2", (40, 30)), ("b/1", (1, 20_000))):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / f"{name}.png").write_bytes(png(*size))
    report = scan_pictures(open_data(tmp_path / "data"))
    assert report.readable.tolist() == [1]
    assert [(p.name, p.reason) for p in report.problems] == [
        ("a/1.png", "too narrow"),
        ("b/1.png", "too narrow"),
    ]
    assert "2,000 × 1 pixels" in report.problems[0].detail


@pytest.mark.parametrize("size", [(MAX_ASPECT * 30, 30), (30, MAX_ASPECT * 30)])
def test_the_narrowest_that_is_let_through(size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(*size))
    assert max(decode_resized(tmp_path / "a.png", FIT).shape) == MAX_ASPECT * FIT.resize
    (tmp_path / "a.png").write_bytes(png(size[0] + (size[0] > size[1]), size[1] + (size[1] > 30)))
    with pytest.raises(PictureError, match="too narrow"):
        decode_resized(tmp_path / "a.png", FIT)


@pytest.mark.parametrize("size", [(50_000, 2), (2, 50_000)])
def test_of_pictures_and_arrays_that_are_handed_over_only_the_middle_is_resized(
    size: tuple[int, int],
) -> None:
    image = Image.new("L", size, 0)
    image.paste(255, (size[0] // 2 - 5, size[1] // 2 - 5, size[0] // 2 + 5, size[1] // 2 + 5))
    fit = Preprocessing(size=56, resize=64, mode="L")
    small = np.asarray(resized(image, fit))
    assert max(small.shape) == MAX_ASPECT * 64
    assert small.max() == 255
    of_array = fitted(np.asarray(image)[None], fit)[0]
    assert of_array.shape == small.shape
    assert of_array.max() == 255


def test_huge_models_get_the_middle_of_long_pictures() -> None:
    assert middle_of(3_000, 2_000, 256) == (0, 0, 3_000, 2_000)
    assert middle_of(40_000, 2_000, 256) == (0, 0, 40_000, 2_000)
    left, _, width, height = middle_of(40_000, 2_000, 4_096)
    assert height == 2_000
    assert left == (40_000 - width) // 2
    assert 4_096 * 4_096 * width / 2_000 <= MAX_RESIZED


@pytest.mark.parametrize("shape", [(64, 64), (64, 97), (301, 64, 3), (65, 64, 3)])
@pytest.mark.parametrize("size", [56, 57, 64])
def test_the_middle_gives_the_same_centre_crop(shape: tuple[int, ...], size: int) -> None:
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, shape, dtype=np.uint8)
    fit = Preprocessing(size=size, resize=64, mode="RGB" if len(shape) == 3 else "L")
    square = middle(picture, fit)
    assert square.shape[:2] == (64, 64)
    whole, part = (transforms.test_views([p], fit) for p in (picture, square))
    np.testing.assert_array_equal(whole, part)


# ---- the same pixels as ever


def plainly(content: bytes, mode: str) -> np.ndarray:
    """What decoding means, without a thought of memory."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert(mode))


def honest() -> Iterator[tuple[str, bytes]]:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (61, 83, 4), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 8
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        yield kind, saved(noise.convert("RGB"), kind)
    for mode in ("RGBA", "LA", "P", "1", "L"):
        yield f"PNG {mode}", saved(noise.convert(mode), "PNG")
    clear = noise.convert("RGB").quantize(50)
    yield "PNG, a clear colour", saved(clear, "PNG", transparency=7)
    yield "GIF, a clear colour", saved(clear, "GIF", transparency=7)
    yield "WebP RGBA", saved(noise, "WEBP", lossless=True)
    deep = Image.fromarray(random.integers(0, 2**16, (61, 83), dtype=np.uint16))
    yield "PNG, 16 bits", saved(deep, "PNG")
    yield "TIFF, 16 bits", saved(deep, "TIFF")
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        yield f"{kind}, turned", saved(noise.convert("RGB"), kind, exif=turned)
    yield "JPEG, progressive", saved(noise.convert("RGB"), "JPEG", progressive=True)
    yield "JPEG, CMYK", saved(noise.convert("CMYK"), "JPEG")
    yield "TIFF, LZW", saved(noise.convert("RGB"), "TIFF", compression="tiff_lzw")
    yield "TIFF, JPEG", saved(noise.convert("RGB"), "TIFF", compression="jpeg")


@pytest.mark.parametrize(
    ("name", "content"), [pytest.param(*pair, id=pair[0]) for pair in honest()]
)
@pytest.mark.parametrize("band", [2**20, 83 * 7])
def test_honest_pictures_are_the_same_bits(
    name: str, content: bytes, band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_BAND", band)
    (tmp_path / "a").write_bytes(content)
    for mode in ("RGB", "L"):
        expected = plainly(content, mode)
        np.testing.assert_array_equal(np.asarray(decode(tmp_path / "a", mode=mode)), expected)
        np.testing.assert_array_equal(np.asarray(decode(io.BytesIO(content), mode=mode)), expected)


def test_large_files_are_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_SMALL", 100)
    for name, content in honest():
        (tmp_path / "a").write_bytes(content)
        assert np.array_equal(np.asarray(decode(tmp_path / "a")), plainly(content, "RGB")), name


# ---- headers


def test_scans_are_counted_where_the_decoder_finds_them() -> None:
    assert count_scans(jpeg(64, 64), 100) == 1
    whole = jpeg(64, 64, "L", progressive=True)
    scans = count_scans(whole, 100)
    assert scans == whole.count(b"\xff\xda") > 1
    assert count_scans(with_scans(whole, 50), 1000) == scans + 50
    assert count_scans(with_scans(whole, 50), 20) == 20
    # an end that is only a comment's text hides nothing, and a preview counts for nothing
    first = whole.index(b"\xff\xda")
    hidden = whole[:first] + segment(0xFE, b"\xff\xd9" * 9) + with_scans(whole, 50)[first:]
    assert count_scans(hidden, 1000) == scans + 50
    preview = whole[:2] + segment(0xE1, jpeg(16, 16)) + whole[2:]
    assert count_scans(preview, 1000) == scans


def test_blocks_of_a_jpeg() -> None:
    full, half = [(1, 1, 1, 0)] * 3, [(1, 2, 2, 0), (2, 1, 1, 0), (3, 1, 1, 0)]
    assert jpeg_blocks(80, 40, full) == 3 * 10 * 5
    assert jpeg_blocks(80, 40, half) == 5 * 3 * 6  # whole groups of 16 × 16
    assert jpeg_blocks(80, 40, []) == 0


def test_chunks_of_a_webp() -> None:
    assert count_chunks(saved(Image.new("RGB", (9, 9)), "WEBP"), 100) == 1
    assert count_chunks(b"RIFF" + bytes(8) + b"abcd\0\0\0\0" * 70, 50) == 50


def test_the_larger_of_two_tags_counts() -> None:
    content = tiff_picture(10, 20, zeros(600), tile=(16, 32))
    layout = tiff_layout(io.BytesIO(content), most_tags=99, most_pieces=99)
    assert (layout.width, layout.height, layout.piece_pixels) == (10, 20, 512)
    with pytest.raises(ValueError, match="tags"):
        tiff_layout(io.BytesIO(content), most_tags=3, most_pieces=99)
    with pytest.raises(TooMuch):
        raise TooMuch("oversized", "as an error of its own")


# ---- files that are no files


def special(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as line:
            line.bind(str(path))
    elif kind == "hole":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to(kind)


@pytest.mark.skipif(sys.platform != "linux", reason="special files of Linux")
@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "hole", "/dev/zero", "/dev/tty", "/proc/self/maps", "/proc/kmsg"]
)
def test_special_files_are_not_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    special(kind, Path("a.png"))
    with pytest.raises(PictureError) as caught:
        decode(Path("a.png"))
    assert caught.value.reason in ("unreadable", "empty file", "not a picture")
