"""The flags of each command, as a dataclass; `nofuss train` has its own in config.py."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from nofuss.config import TrainConfig

_Run = Annotated[Path, Positional, arg(metavar="RUN")]
_Device = Annotated[str, arg(metavar="NAME")]


@dataclass(frozen=True)
class Evaluate:
    """Score a run: Recall@K, MAP@R, R-precision, NMI and AMI on classes it has not seen."""

    run: _Run
    """A run directory of `nofuss train`."""
    data: Annotated[
        Path | None,
        Positional,
        arg(metavar="DATA", help_behavior_hint="(default: the run's own test classes)"),
    ] = None
    """Other data to score the run on, all of it. In a CSV whose split column says query and
    gallery, the ones search among the others."""
    gallery: Annotated[Path | None, arg(metavar="GALLERY", help_behavior_hint="")] = None
    """Search in these instead of among DATA, which are then queries only. A picture of DATA that
    is in the gallery too is left out of its own search."""
    k: Annotated[tuple[int, ...], arg(metavar="K")] = (1, 2, 4, 8)
    """The K of Recall@K; for the run's own test classes 1, 2, 4 and 8 come with them."""
    extended: bool = False
    """Also MAP over all ranks, MRR, precision@K, and the means over classes of all scores."""
    seed: int = 0
    """Of k-means and the bootstrap."""
    json: bool = False
    """Print the scores as JSON instead of a table."""
    device: _Device = "auto"
    """Where to compute, as for `nofuss train`."""


@dataclass(frozen=True)
class Embed:
    """Embed data with a run's model and write vectors, names and labels to a file."""

    run: _Run
    """A run directory of `nofuss train`."""
    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """Pictures or vectors, in any layout that `nofuss train` reads."""
    out: Annotated[Path, arg(metavar="FILE")]
    """An .npz or .safetensors file; never overwritten."""
    device: _Device = "auto"
    """Where to compute, as for `nofuss train`."""


@dataclass(frozen=True)
class Demo:
    """Train on half of the built-in characters, then find the other half. Three minutes."""

    out: Annotated[
        Path | None,
        arg(metavar="RUN", help_behavior_hint="(default: a new folder under runs/)"),
    ] = None
    """The run directory."""
    epochs: int = 15
    """How often the training characters are seen."""
    seed: int = 0
    """Of everything random."""


@dataclass(frozen=True)
class IndexPictures:
    """Embed a folder for search; only what changed is embedded again. Other folders stay in."""

    run: _Run
    """A run directory of `nofuss train`."""
    data: Annotated[
        Path | None, Positional, arg(metavar="DIR", help_behavior_hint="(default: the run's own)")
    ] = None
    """Pictures or vectors in any layout that `nofuss train` reads, of any classes; pictures
    outside class folders have no label."""
    remove: bool = False
    """Take the pictures of DIR out of the index instead."""
    kind: Annotated[
        Literal["exact", "approximate"] | None,
        arg(help_behavior_hint="(default: as it is; exact at first)"),
    ] = None
    """approximate is for many millions and needs faiss."""
    device: _Device = "auto"
    """Where to compute, as for `nofuss train`."""


@dataclass(frozen=True)
class Search:
    """Find what is most like a picture, in the run's index."""

    run: _Run
    """A run directory of `nofuss train`."""
    pictures: Annotated[tuple[Path, ...], Positional, arg(metavar="PICTURE")]
    """One or more pictures (an .npz of vectors, if the run is about vectors)."""
    k: Annotated[int, arg(aliases=["-k"], metavar="N")] = 10
    """How many neighbours."""
    json: bool = False
    """Print the results as JSON."""
    show: Annotated[Path | None, arg(metavar="FILE.png", help_behavior_hint="")] = None
    """Also draw them: a row a query, itself on the left. Never overwritten."""


@dataclass(frozen=True)
class Doctor:
    """Look for what is wrong with data: unreadable files, copies, doubtful labels. Reads only."""

    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """Any layout that `nofuss train` reads."""
    run: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """A run directory: its model finds labels that their neighbours contradict."""
    json: bool = False
    """Print everything that was found as JSON."""


@dataclass(frozen=True)
class Export:
    """Write a run's model in a format for elsewhere, checked against the original."""

    run: _Run
    """A run directory of `nofuss train`."""
    onnx: Annotated[Path, arg(metavar="FILE.onnx")]
    """The file to write; never overwritten. Needs pip install 'nofuss[onnx]'."""


@dataclass(frozen=True)
class Serve:
    """Open a page to search in: the run's index, or its test classes where it has none."""

    run: _Run
    """A run directory of `nofuss train`."""
    port: int = 8000
    """Where to listen; 0 takes any free port."""
    host: str = "127.0.0.1"
    """The address to listen on; the default is reached from this machine only."""
    no_token: bool = False
    """Let everyone on this machine in, without the token in the address."""


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's tables and figures again, and put its numbers beside ours."""

    names: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="NAME", help_behavior_hint="(default: all that the data allow)"),
    ] = ()
    """cub, cars, products, characters (tables); convergence, fractional, dynamic, batch-size,
    bounds, retrieval (figures)."""
    data: Annotated[
        Path | None,
        arg(metavar="DIR", help_behavior_hint="(default: the built-in characters)"),
    ] = None
    """The official folder of CUB-200-2011, Cars196 or Stanford Online Products, or the folder
    that holds them."""
    budget: Literal["minutes", "hours", "paper"] = "minutes"
    """minutes: a head on fixed features, or a small convnet on characters. hours: fine-tuning.
    paper: the paper's own setting."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("reproduction")
    """Where report.html, results.json and the finished trainings (work/) go; a command that was
    stopped goes on from them."""
    seeds: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: by the budget, 3 or more)")
    ] = None
    """Trainings of each method."""
    weights: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """With --budget paper: a public BN-Inception file to start from, as the paper did."""
    device: _Device = "auto"
    """Where to compute, as for `nofuss train`."""


Command = (
    TrainConfig
    | Serve
    | Evaluate
    | Embed
    | Demo
    | IndexPictures
    | Search
    | Doctor
    | Export
    | Reproduce
)
SPREAD = TrainConfig | Evaluate | Embed | Demo | IndexPictures
"""What several processes can do together."""
COMMANDS: dict[str, Callable[..., object]] = {
    "train": TrainConfig,
    "evaluate": Evaluate,
    "embed": Embed,
    "demo": Demo,
    "serve": Serve,
    "index": IndexPictures,
    "search": Search,
    "doctor": Doctor,
    "export": Export,
    "reproduce": Reproduce,
}
