"""`nofuss export`: write the model as an ONNX file, checked against the original."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import RunPath, console
from nofuss.errors import TrainingError, UsageError
from nofuss.progress import working

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
    from nofuss.model.onnx import CHECKED, export_model, onnx_packages

    if onnx.suffix != ".onnx":
        raise UsageError(f"--onnx {onnx} does not end in .onnx; give a name that does")
    if onnx.exists():
        raise UsageError(f"{onnx} exists and is never overwritten; give another name")
    onnx_packages()
    encoder = load(run, device="cpu")
    with working(console.progress, "exporting the network"):
        content, difference = export_model(
            encoder.embedder, class_names=encoder.class_names, extra=encoder.extra
        )
    if not difference <= LARGEST_DIFFERENCE:
        raise TrainingError(
            f"the exported model differs from the original by {difference:.2g}, expected at most "
            f"{LARGEST_DIFFERENCE:g}; nothing was written; please report this"
        )
    onnx.parent.mkdir(parents=True, exist_ok=True)
    write_file(onnx, content)
    console.say(
        f"{onnx}: {len(content) / 1e6:.1f} MB, the largest difference from torch on {CHECKED} "
        f"random inputs is {difference:.1e}"
    )
