"""The commands. Thin: each is a dataclass of its flags and a call; torch loads only when needed."""

import ctypes
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from nofuss.config import TrainConfig
from nofuss.errors import NofussError, UsageError, unknown_name

_Run = Annotated[Path, Positional, arg(metavar="RUN")]


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
    """Other data to score the run on, all of it."""
    k: Annotated[tuple[int, ...], arg(metavar="K")] = (1, 2, 4, 8)
    """The K of Recall@K."""
    seed: int = 0
    """Of k-means and the bootstrap."""
    json: bool = False
    """Print the scores as JSON instead of a table."""


@dataclass(frozen=True)
class Embed:
    """Embed data with a run's model and write vectors, names and labels to a file."""

    run: _Run
    """A run directory of `nofuss train`."""
    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """Pictures or vectors, in any layout that `nofuss train` reads."""
    out: Annotated[Path, arg(metavar="FILE")]
    """An .npz or .safetensors file; never overwritten."""


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
_SPREAD = TrainConfig | Evaluate | Embed | Demo | IndexPictures
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


def parse(argv: Sequence[str]) -> Command:
    """The command line as one of the dataclasses; exits with 2 on what it does not know."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise unknown_name("command", argv[0], COMMANDS)
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="nofuss",
        description="Learn a distance that works on classes never seen before.",
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    assert isinstance(command, Command)
    return command


def told(argv: Sequence[str]) -> set[str]:
    """Names of the settings that the command line gives, whatever their values."""
    flags = (word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--"))
    return {flag.removeprefix("no_") for flag in flags}


def run(command: Command, argv: Sequence[str] = ()) -> None:
    """Do what the command asks; under torchrun all processes do it together, and one speaks."""
    from nofuss import console, processes

    warnings.showwarning = lambda message, *_, **__: console.warn(str(message))
    if processes.under_torchrun() and not isinstance(command, _SPREAD):
        raise UsageError(f"{type(command).__name__} works in one process; leave torchrun out")
    with processes.joined() as how_they_met:
        console.speak(processes.first())
        if how_they_met:
            console.aside(how_they_met)
        _do(command, argv)


def _do(command: Command, argv: Sequence[str]) -> None:
    from nofuss import commands, pipeline

    match command:
        case TrainConfig():
            pipeline.train(command, told=told(argv))
        case Evaluate():
            commands.evaluate_run(
                command.run, command.data, ks=command.k, seed=command.seed, as_json=command.json
            )
        case Embed():
            commands.embed(command.run, command.data, command.out)
        case Demo():
            commands.demo(command.out, epochs=command.epochs, seed=command.seed)
        case Serve():
            from nofuss.search.server import serve

            serve(command.run, host=command.host, port=command.port, token=not command.no_token)
        case IndexPictures():
            from nofuss.search.commands import index_run

            index_run(command.run, command.data, remove=command.remove, kind=command.kind)
        case Search():
            from nofuss.search.commands import search_run

            search_run(
                command.run,
                command.pictures,
                k=command.k,
                as_json=command.json,
                show=command.show,
            )
        case Doctor():
            from nofuss.doctor import examine

            examine(command.data, command.run, as_json=command.json)
        case Export():
            from nofuss.export import export_run

            export_run(command.run, command.onnx)
        case Reproduce():
            from nofuss.paper.reproduce import reproduce

            reproduce(
                command.names,
                data=command.data,
                budget=command.budget,
                out=command.out,
                seeds=command.seeds,
                weights=command.weights,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The `nofuss` program; returns the exit code: 0, 1 runtime, 2 usage or data, 130 stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal can't show
            stream.reconfigure(errors="backslashreplace")
    try:
        command = parse([a for a in arguments if a != "--debug"])
        if getattr(command, "keep_memory", True):
            _keep_freed_memory()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # asks as Ctrl-C does
        run(command, arguments)
    except NofussError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        if _is_out_of_memory(error):
            cure = "smaller --batch, --size, --dim or data, or a machine with more"
            return _fail(f"not enough memory; try {cure}", 1)
        if isinstance(error, OSError) and error.strerror:
            where = f" ({error.filename})" if error.filename else ""
            return _fail(f"{error.strerror}{where}; mend it and run the command again", 1)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return _fail(f"{reason} (unexpected; run again with --debug for the details)", 1)
    return 0


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or torch's, which is told by its words only."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _fail(message: str, code: int) -> int:
    from nofuss.console import fail

    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    fail(message if rank == "0" else f"rank {rank}: {message}")
    return code


def _keep_freed_memory() -> None:
    """Ask glibc not to give freed memory back: mapping it anew costs as much as the arithmetic.

    Training a convolutional network is then nearly twice as fast on a CPU. Memory stays at its
    peak, so this is for a program of our own, never for a library.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
