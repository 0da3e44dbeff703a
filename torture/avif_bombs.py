"""Bombs in AVIF: streams that are larger than the container says; none where Pillow has no AVIF."""

import io
import struct

from PIL import Image, features

from torture.more_bombs import Make


def avif(width: int, height: int) -> bytes:
    """Return an AVIF of one color."""
    with io.BytesIO() as buffer:
        Image.new("RGB", (width, height), "teal").save(buffer, "AVIF", speed=10, quality=40)
        return buffer.getvalue()


def lying(content: bytes, width: int, height: int) -> bytes:
    """Return an AVIF whose container says another size than its stream."""
    at = content.index(b"ispe") + 8
    return content[:at] + struct.pack(">II", width, height) + content[at + 8 :]


def avif_bombs() -> dict[str, Make]:
    """Return bombs in AVIF."""
    if "avif" not in features.modules or not features.check_module("avif"):
        return {}
    return {
        "30 megapixels": lambda: avif(6_000, 5_000),
        "30 megapixels that say they are few": lambda: lying(avif(6_000, 5_000), 64, 48),
        "few pixels that say they are many": lambda: lying(avif(64, 48), 60_000, 60_000),
    }


def avif_at_the_limit() -> dict[str, Make]:
    """Return what is just not refused."""
    return {"AVIF": lambda: avif(4_300, 3_600)} if avif_bombs() else {}
