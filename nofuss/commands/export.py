"""`nofuss export`: write the model as an ONNX file, checked against the original."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nofuss.commands import RunPath, console
from nofuss.errors import NofussError, TrainingError, UsageError
from nofuss.progress import working

if TYPE_CHECKING:
    from torch import Tensor

    from nofuss.config import Settings
    from nofuss.model.encoder import Encoder

log = logging.getLogger("nofuss")

CHECKED = 16
"""Number of inputs that both runtimes are compared on."""
LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference, as a fraction of the largest entry of all embeddings."""


def main(run: RunPath, /, *, onnx: Annotated[Path, Parameter(metavar="FILE.onnx")]) -> None:
    """Write a run's model as an ONNX file, checked against the original.

    Args:
        run: A run directory of `nofuss train`.
        onnx: The file to write; never overwritten. Needs pip install 'nofuss[onnx]'.
    """
    from nofuss.files import write_file  # all here, so that --help does not load torch
    from nofuss.model.encoder import load
    from nofuss.model.onnx import export_model, onnx_packages
    from nofuss.run.directory import Run

    if onnx.suffix != ".onnx":
        raise UsageError(f"--onnx {onnx} does not end in .onnx; give a name that does")
    if onnx.exists():
        raise UsageError(f"{onnx} exists and is never overwritten; give another name")
    onnx_packages()
    config, encoder = Run.open(run).config, load(run, device="cpu")
    inputs, what = _inputs(encoder, config)
    names, extra = encoder.class_names, encoder.extra
    with working(console.progress, "exporting the network"):
        content, difference = export_model(encoder.embedder, inputs, class_names=names, extra=extra)
    if not difference <= LARGEST_DIFFERENCE:
        raise TrainingError(
            f"the exported model differs from the original by {difference:.2g}, expected at most "
            f"{LARGEST_DIFFERENCE:g}; nothing was written; please report this"
        )
    onnx.parent.mkdir(parents=True, exist_ok=True)
    write_file(onnx, content)
    console.say(
        f"{onnx}: {len(content) / 1e6:.1f} MB, the largest difference from torch on "
        f"{len(inputs)} {what} is {difference:.1e}"
    )


def _inputs(encoder: "Encoder", config: "Settings") -> tuple["Tensor", str]:
    """Return a few items of the run's data as model inputs; noise if the data are not readable."""
    import numpy as np
    import torch

    from nofuss.data.loader import batches
    from nofuss.data.open import open_data
    from nofuss.data.readers.folder import labelling_of

    p, channels = encoder.preprocessing, encoder.embedder.backbone.channels
    try:
        collection = open_data(config.data, labelling=labelling_of(config))
        rows = np.linspace(0, len(collection) - 1, min(CHECKED, len(collection))).astype(int)
        batch = next(batches(collection, p, [rows], train=False))
        return batch.inputs, "of the run's own " + ("vectors" if p is None else "pictures")
    except NofussError as error:
        log.warning(f"the run's data can't be read ({error}); comparing on noise instead")
    shape = (channels,) if p is None else (channels, p.size, p.size)
    noise = torch.randn(CHECKED, *shape, generator=torch.Generator().manual_seed(0))
    return noise, "inputs of noise"
