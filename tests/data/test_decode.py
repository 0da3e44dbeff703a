"""Pictures of every kind, and files that only pretend."""

import io
import resource
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from nofuss.config import Preprocessing
from nofuss.data.decode import PictureError, decode, decode_resized
from nofuss.data.formats import reads_avif, reads_heif, register_heif

GRADIENT = np.linspace(0, 255, 40 * 30).reshape(30, 40).astype(np.uint8)
COLORS = np.stack([GRADIENT, GRADIENT[::-1], GRADIENT[:, ::-1]], axis=-1)
EXTRA = [*(["avif"] if reads_avif() else []), *(["heic"] if reads_heif() else [])]
if reads_heif():
    register_heif()


def save(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "gif", "webp", "jpg", *EXTRA])
def test_each_format_under_its_own_and_under_a_wrong_name(tmp_path: Path, suffix: str) -> None:
    options = {"lossless": True} if suffix == "webp" else {}
    file = save(tmp_path, Image.fromarray(COLORS), f"a.{suffix}", **options)
    wrong = file.rename(tmp_path / "a.wrong")
    image = decode(wrong)
    assert image.mode == "RGB"
    exact = suffix in ("png", "bmp", "tiff", "webp")
    assert np.abs(np.asarray(image).astype(int) - COLORS).mean() <= (0 if exact else 24)


def test_formats_outside_the_list_are_not_pictures(tmp_path: Path) -> None:
    file = save(tmp_path, Image.fromarray(COLORS), "a.ppm").rename(tmp_path / "a.png")
    with pytest.raises(PictureError, match=r"a\.png: not a picture"):
        decode(file)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    deep = Image.fromarray(GRADIENT.astype(np.uint16) * 257)
    for name in ("a.png", "a.tiff"):
        np.testing.assert_array_equal(decode(save(tmp_path, deep, name), mode="L"), GRADIENT)


@pytest.mark.parametrize("factor", [1 / 255, 1.0])
def test_floats_from_zero_to_one_or_to_255_are_scaled(tmp_path: Path, factor: float) -> None:
    file = save(tmp_path, Image.fromarray(GRADIENT.astype(np.float32) * factor), "a.tiff")
    np.testing.assert_array_equal(decode(file, mode="L"), GRADIENT)
    assert decode(file).mode == "RGB"


@pytest.mark.parametrize("pixel", [-0.5, 4000.0, float("nan"), float("inf")])
def test_floats_of_unknown_white_are_refused(tmp_path: Path, pixel: float) -> None:
    pixels = GRADIENT.astype(np.float32) / 255
    pixels[3, 4] = pixel
    with pytest.raises(PictureError, match=r"unreadable \(pixels from .+; scale them to 8 or 16"):
        decode(save(tmp_path, Image.fromarray(pixels), "a.tiff"))


def test_whole_numbers_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    pixels = GRADIENT.astype(np.int32) * 70_000
    with pytest.raises(PictureError, match=r"pixels from 0 to 1\.785e\+07; scale them"):
        decode(save(tmp_path, Image.fromarray(pixels), "a.tiff"))


def test_a_film_of_avif_is_refused(tmp_path: Path) -> None:
    if not reads_avif():
        pytest.skip("this Pillow has no AVIF")
    frames = [Image.fromarray(COLORS), Image.fromarray(COLORS[::-1])]
    file = save(tmp_path, frames[0], "a.avif", save_all=True, append_images=frames[1:])
    with pytest.raises(PictureError, match=r"too complex \(an animation\)"):
        decode(file)


def test_cmyk_comes_out_as_its_colors(tmp_path: Path) -> None:
    red = Image.new("RGB", (16, 16), (255, 0, 0)).convert("CMYK")
    pixel = np.asarray(decode(save(tmp_path, red, "a.jpg")))[8, 8]
    assert pixel[0] > 200
    assert max(pixel[1:]) < 60


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    black = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half = Image.new("LA", (4, 4), (0, 128))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert set(np.asarray(decode(save(tmp_path, black, "a.png"))).flat) == {255}
    assert set(np.asarray(decode(save(tmp_path, half, "b.png"), mode="L")).flat) == {127}
    clear = save(tmp_path, palette, "c.png", transparency=0)
    assert set(np.asarray(decode(clear)).flat) == {255}
    assert set(np.asarray(decode(save(tmp_path, palette, "d.png"))).flat) == {0}


def test_turned_pictures_are_set_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    lying = save(tmp_path, Image.fromarray(GRADIENT), "a.png", exif=exif)
    np.testing.assert_array_equal(decode(lying, mode="L"), np.rot90(GRADIENT, -1))


def test_of_a_moving_picture_the_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), value) for value in (10, 200, 90)]
    moving = save(tmp_path, frames[0], "a.gif", save_all=True, append_images=frames[1:])
    assert set(np.asarray(decode(moving, mode="L")).flat) == {10}


def test_reduced_scale_never_falls_below_what_is_asked(tmp_path: Path) -> None:
    file = save(tmp_path, Image.fromarray(COLORS).resize((800, 600)), "a.jpg")
    assert decode(file).size == (800, 600)
    assert decode(file, at_least=150).size == (200, 150)
    assert decode(file, at_least=151).size == (400, 300)


@pytest.mark.parametrize("size", [(800, 600), (97, 301), (64, 64), (46, 900)])
def test_resizing_sets_the_short_side_or_both(tmp_path: Path, size: tuple[int, int]) -> None:
    file = save(tmp_path, Image.fromarray(COLORS).resize(size), "a.jpg")
    height, width, _ = decode_resized(file, Preprocessing(size=56, resize=64)).shape
    assert min(height, width) == 64
    assert max(height, width) == round(64 * max(size) / min(size))
    squashed = decode_resized(file, Preprocessing(size=56, resize=64, squash=True, mode="L"))
    assert squashed.shape == (64, 64)


def png_of(width: int, height: int) -> bytes:
    """A valid gray PNG of zeros, small on disk however large the picture is."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes((width + 7) // 8 + 1)) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", rows + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(14_000, 14_000), (10_000, 9_000), (8_001, 10_000)])
def test_a_bomb_is_refused_by_its_header_and_costs_no_memory(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_of(*size))
    assert bomb.stat().st_size < 40_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PictureError, match=r"bomb\.png: oversized \(over 80 megapixels\)"):
        decode(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "tiff", "bmp", *EXTRA])
def test_half_a_file_is_noticed(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    file = save(tmp_path, Image.fromarray(noise), f"a.{suffix}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(PictureError) as caught:
        decode(file)
    assert caught.value.reason in {"truncated", "unreadable", "not a picture"}
    assert suffix not in ("jpg", "png", "bmp") or caught.value.reason == "truncated"


def test_files_that_are_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    for name, reason in (
        ("empty.jpg", "empty file"),
        ("text.jpg", "not a picture"),
        ("gone.jpg", "missing"),
        (".", "unreadable"),
    ):
        with pytest.raises(PictureError) as caught:
            decode(tmp_path / name)
        assert caught.value.reason == reason
    with pytest.raises(PictureError, match="picture: not a picture"):
        decode(io.BytesIO(b"upload"))


def picture_bytes(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(COLORS).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.fuzz
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(
        [
            "JPEG",
            "PNG",
            "WEBP",
            "GIF",
            "TIFF",
            "BMP",
            *("HEIF" if e == "heic" else "AVIF" for e in EXTRA),
        ]
    ),
    st.data(),
)
def test_damaged_bytes_decode_or_raise_one_line(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(picture_bytes(kind))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=5)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        assert decode(io.BytesIO(damaged)).mode == "RGB"
        complaint = ""
    except PictureError as error:
        complaint = str(error)
    assert "\n" not in complaint
