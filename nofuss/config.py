"""Frozen dataclasses that describe a run; each is saved as JSON and read back."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the tensor a backbone wants; saved with every model.

    A picture is converted to `mode`, resized, cropped to `size` × `size`, and mapped
    channel by channel to (value − mean) / std with value in 0…255.
    """

    size: int
    """Side of the square crop that the backbone sees."""
    resize: int
    """Side that the picture is resized to before the crop."""
    squash: bool = False
    """True: resize to a resize × resize square as the paper does. False: the short side."""
    mode: str = "RGB"
    """Pillow mode: "RGB" or "L"."""
    mean: tuple[float, ...] = (127.0, 127.0, 127.0)
    std: tuple[float, ...] = (128.0, 128.0, 128.0)
    flip: bool = True
    """Mirror at random in training; off where left and right differ in meaning (characters)."""
    affine: float = 0.0
    """Strength of small random affine changes in training (0 = none): rotation, scale, shift."""
