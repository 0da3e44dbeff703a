"""Any torch Dataset of (picture, label) pairs, through the whole of nofuss.

python examples/custom_dataset.py
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

from nofuss import load, train


class Digits(Dataset[tuple[Image.Image, int]]):
    """Scikit-learn's digits as pictures of 32 × 32."""

    def __init__(self) -> None:
        pixels, self.targets = load_digits(return_X_y=True)
        self.pixels = (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]).resize((32, 32)), int(self.targets[index])


def main() -> None:
    """Train on five of the ten digits, then embed a picture with what was learned."""
    digits = Digits()
    with tempfile.TemporaryDirectory() as folder:
        run = train(digits, out=Path(folder) / "run", preset="small", epochs=2, dim=16)
        print("embedding of one picture:", load(run).embed([digits[0][0]])[0, :4], "…")


if __name__ == "__main__":
    main()
