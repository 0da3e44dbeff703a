"""Pictures of every kind, and files that only pretend."""

import io
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from nofuss.config import Preprocessing
from nofuss.data.decode import (
    FORMATS,
    MAX_ASPECT,
    READS_AVIF,
    READS_HEIF,
    PictureError,
    _register_heif,
    decode,
    decode_resized,
    encoded,
    shrunk,
)
from torture.bombs import png, saved

GRADIENT = np.linspace(0, 255, 40 * 30).reshape(30, 40).astype(np.uint8)
COLORS = np.stack([GRADIENT, GRADIENT[::-1], GRADIENT[:, ::-1]], axis=-1)
EXTRA = ["avif"] * READS_AVIF + ["heic"] * READS_HEIF
FIT = Preprocessing(size=56, resize=64)
_register_heif()  # so that Pillow writes it too


def save(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


def test_formats_outside_the_list_are_not_pictures(tmp_path: Path) -> None:
    file = save(tmp_path, Image.fromarray(COLORS), "a.ppm").rename(tmp_path / "a.png")
    with pytest.raises(PictureError, match=r"a\.png"):
        decode(file)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    pixels = GRADIENT.astype(np.uint16) * 257
    deep = Image.fromarray(pixels)
    for name in ("a.png", "a.tiff"):
        np.testing.assert_array_equal(decode(save(tmp_path, deep, name), mode="L"), GRADIENT)
    big_endian = Image.frombytes("I;16B", deep.size, pixels.astype(">u2").tobytes())
    file = save(tmp_path, big_endian, "b.tiff")
    np.testing.assert_array_equal(decode(file, mode="L"), GRADIENT)


@pytest.mark.parametrize("factor", [1 / 255, 1.0])
def test_floats_from_zero_to_one_or_to_255_are_scaled(tmp_path: Path, factor: float) -> None:
    file = save(tmp_path, Image.fromarray(GRADIENT.astype(np.float32) * factor), "a.tiff")
    np.testing.assert_array_equal(decode(file, mode="L"), GRADIENT)
    assert decode(file).mode == "RGB"


@pytest.mark.parametrize("pixel", [-0.5, 4000.0, float("nan"), float("inf")])
def test_floats_of_unknown_white_are_refused(tmp_path: Path, pixel: float) -> None:
    pixels = GRADIENT.astype(np.float32) / 255
    pixels[3, 4] = pixel
    with pytest.raises(PictureError, match=r"unreadable \(pixels from"):
        decode(save(tmp_path, Image.fromarray(pixels), "a.tiff"))


def test_whole_numbers_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    pixels = GRADIENT.astype(np.int32) * 70_000
    with pytest.raises(PictureError, match=r"0 to 1\.785e\+07"):
        decode(save(tmp_path, Image.fromarray(pixels), "a.tiff"))


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


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff", *["avif"] * READS_AVIF])
def test_of_an_animation_the_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (16, 16), (value,) * 3) for value in (10, 200, 90)]
    file = save(tmp_path, frames[0], f"a.{suffix}", save_all=True, append_images=frames[1:])
    assert np.abs(np.asarray(decode(file)).astype(int) - 10).max() <= 2


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


@pytest.mark.parametrize("size", [(14_000, 14_000), (10_000, 9_000), (8_001, 10_000)])
def test_a_bomb_is_refused_by_its_header_and_costs_no_memory(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png(*size, depth=1, color=0))
    assert bomb.stat().st_size < 40_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PictureError, match=r"bomb\.png: oversized"):
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
        decode(b"upload")


@pytest.mark.fuzz
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(FORMATS), st.data())
def test_damaged_bytes_decode_or_raise_one_line(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(saved(Image.fromarray(COLORS), kind))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=5)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        assert decode(bytes(damaged)).mode == "RGB"
        complaint = ""
    except PictureError as error:
        complaint = str(error)
    assert "\n" not in complaint


@pytest.mark.parametrize("size", [(MAX_ASPECT * 30, 30), (30, MAX_ASPECT * 30)])
def test_the_narrowest_that_is_let_through(size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(*size))
    assert max(decode_resized(tmp_path / "a.png", FIT).shape) == MAX_ASPECT * FIT.resize
    (tmp_path / "a.png").write_bytes(png(size[0] + (size[0] > size[1]), size[1] + (size[1] > 30)))
    with pytest.raises(PictureError, match="too narrow"):
        decode_resized(tmp_path / "a.png", FIT)


# ---- as Pillow alone decodes


def plainly(content: bytes, mode: str) -> np.ndarray:
    """What decoding means."""
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
    for kind in FORMATS:
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


@pytest.mark.parametrize("content", [pytest.param(pair[1], id=pair[0]) for pair in honest()])
def test_files_and_their_content_give_the_same_bits(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    for mode in ("RGB", "L"):
        expected = plainly(content, mode)
        np.testing.assert_array_equal(np.asarray(decode(tmp_path / "a", mode=mode)), expected)
        np.testing.assert_array_equal(np.asarray(decode(content, mode=mode)), expected)


@pytest.mark.parametrize("side", [40, 400])
def test_a_thumbnail_passes_no_bytes_of_the_file_on(tmp_path: Path, side: int) -> None:
    secret = b"a profile with a secret in it"
    file = tmp_path / "a.png"
    Image.new("RGB", (side, side)).save(file, icc_profile=secret)
    content, _ = encoded(shrunk(decode(file), 224))
    assert "icc_profile" not in Image.open(io.BytesIO(content)).info
    Image.new("RGB", (side, side)).save(tmp_path / "a.gif", comment=b"secret" * 20_000)
    content, _ = encoded(shrunk(decode(tmp_path / "a.gif"), 224))
    assert b"secret" not in content
