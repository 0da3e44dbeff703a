"""`nofuss export`: write the model as an ONNX file, checked against the original."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nofuss.commands import RunPath, console
from nofuss.errors import TrainingError, UsageError
from nofuss.progress import working


def main(run: RunPath, /, *, onnx: Annotated[Path, Parameter(metavar="FILE.onnx")]) -> None:
    """Write a run's model as an ONNX file, checked against the original.

    Args:
        run: A run directory of `nofuss train`.
        onnx: The file to write; never overwritten. Needs pip install 'nofuss[onnx]'.
    """
    from nofuss.data.labelling import labelling_of  # all here, so that --help does not load torch
    from nofuss.files import write_file
    from nofuss.model import export
    from nofuss.model.encoder import load
    from nofuss.run.directory import Run

    if onnx.suffix != ".onnx":
        raise UsageError(f"--onnx {onnx} does not end in .onnx; give a name that does")
    if onnx.exists():
        raise UsageError(f"{onnx} exists and is never overwritten; give another name")
    exporter, runtime = export.onnx_packages()
    config = Run.open(run).config
    encoder = load(run, device="cpu")
    inputs, what = export.real_inputs(encoder, config.data, labelling_of(config))
    onnx.parent.mkdir(parents=True, exist_ok=True)
    content = export.to_onnx(encoder, inputs, exporter, progress=console.progress)
    with working(console.progress, "comparing with torch"):
        difference = export.largest_difference(encoder, inputs, content, runtime)
    if not difference <= export.LARGEST_DIFFERENCE:
        raise TrainingError(
            f"the exported model differs from the original by {difference:.2g}, expected at most "
            f"{export.LARGEST_DIFFERENCE:g}; nothing was written; please report this"
        )
    write_file(onnx, content)
    console.say(
        f"{onnx}: {onnx.stat().st_size / 1e6:.1f} MB, the largest difference from torch on "
        f"{len(inputs)} {what} is {difference:.1e}"
    )
