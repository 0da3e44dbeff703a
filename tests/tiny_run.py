"""Small runs for tests of what reads a run: pictures in folders, and vectors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from nofuss.config import Options
from nofuss.model.embedder import build_embedder
from nofuss.model.saved import save_model
from nofuss.run.directory import create_run
from nofuss.training.train import run_training
from tests.asked import settings_of

HOSTILE = '<img src=x onerror="document.title=1">'
CLASSES = [HOSTILE, "&amp; <b>bold<", "'\"><script>alert(1)<", "plain", "ünïcode ★", "six"]
COLOURS = ["crimson", "royalblue", "seagreen", "orange", "purple", "gray"]


def draw(label: int, number: int, *, side: int = 40) -> Image.Image:
    """A shape whose colour is its class, somewhere on white."""
    random = np.random.default_rng([label, number])
    picture = Image.new("RGB", (side, side), "white")
    x, y, size = random.integers(2, side // 2, 3)
    ImageDraw.Draw(picture).ellipse((x, y, x + size + 6, y + size + 6), fill=COLOURS[label])
    return picture


def draw_folder(root: Path, names: Sequence[str], *, each: int) -> Path:
    """A folder of class folders with so many shapes each."""
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(each):
            draw(label, number).save(root / name / f"{number}.png")
    return root


def scene(seed: int, size: int = 96) -> Image.Image:
    """Soft random blobs: as smooth as a photograph."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)


def write_pictures(folder: Path, *, per_class: int = 5) -> Path:
    """Class folders with names that are markup; one picture is there twice."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            draw(label, number).save(folder / name / f"{number}<i>.png")
    draw(3, 0).save(folder / CLASSES[3] / "again.png")
    return folder


def train_pictures(folder: Path, **options: object) -> Path:
    """A run on those pictures: half of the classes are for training."""
    data = write_pictures(folder / "data")
    defaults = {"preset": "small", "epochs": 1, "dim": 8, "size": 24, "batch_size": 8}
    return run_training(Options(data=data, out=folder / "run", **(defaults | options)))  # type: ignore[arg-type]


def untrained_pictures(data: Path, folder: Path) -> Path:
    """A run on pictures whose network is untrained: it distinguishes colours all the same."""
    made = create_run(settings_of("pictures", 40, data=data, out=folder), name="run")
    save_model(made.model, build_embedder("convnet", dim=8, channels=3, weights=None))
    return made.path


def train_vectors(folder: Path) -> Path:
    """A run on vectors around a centre a class: half of the classes are for training."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(12, 16))
    labels = np.repeat(np.arange(12), 6)
    vectors = (centres[labels] + 0.3 * random.normal(size=(72, 16))).astype(np.float32)
    np.savez(folder / "data.npz", vectors=vectors, labels=labels)
    asked = Options(
        data=folder / "data.npz", out=folder / "run", epochs=2, dim=8, test_fraction=0.5
    )
    return run_training(asked)
