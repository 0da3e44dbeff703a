"""The `nofuss` program: from a command line to a call; torch loads only when needed."""

import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence

import tyro

from nofuss.config import TrainConfig
from nofuss.errors import NofussError, UsageError, unknown_name, visible
from nofuss.flags import (
    COMMANDS,
    SPREAD,
    Command,
    Demo,
    Doctor,
    Embed,
    Evaluate,
    Export,
    IndexPictures,
    Reproduce,
    Search,
    Serve,
)

if sys.platform != "win32":
    import resource  # here: when memory is short there may be none left for it


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

    tell = console.aside if getattr(command, "json", False) else console.warn
    warnings.showwarning = lambda message, *_, **__: tell(str(message))
    if processes.under_torchrun() and not isinstance(command, SPREAD):
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
                command.run,
                command.data,
                gallery=command.gallery,
                ks=command.k,
                extended=command.extended,
                seed=command.seed,
                as_json=command.json,
                device=command.device,
            )
        case Embed():
            commands.embed(command.run, command.data, command.out, device=command.device)
        case Demo():
            commands.demo(command.out, epochs=command.epochs, seed=command.seed)
        case Serve():
            from nofuss.search.server import serve

            serve(command.run, host=command.host, port=command.port, token=not command.no_token)
        case IndexPictures():
            from nofuss.search.commands import index_run

            index_run(
                command.run,
                command.data,
                remove=command.remove,
                kind=command.kind,
                device=command.device,
            )
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
                device=command.device,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The `nofuss` program; returns the exit code: 0, 1 runtime, 2 usage or data, 130 stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that the terminal can't show
            stream.reconfigure(errors="backslashreplace")
    try:
        command = _parse_visibly([a for a in arguments if a != "--debug"])
        if getattr(command, "keep_memory", True):
            _keep_freed_memory()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # asks as Ctrl-C does
        run(command, arguments)
    except NofussError as error:
        if debug:
            _show_tracebacks()
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        gc.freeze()  # or the interpreter looks through all of torch for garbage before it ends
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            _show_tracebacks()
            raise
        return _fail(_explain(error), 1)
    return 0


def _explain(error: Exception) -> str:
    """One line about what no code of ours caught."""
    if _is_out_of_memory(error):
        return f"not enough memory; {_more_memory()}"
    if isinstance(error, UnicodeEncodeError):
        name, encoding = ascii(error.object), sys.getfilesystemencoding()
        return f"file names are in {encoding} here, which can't say {name}; set LC_ALL=C.UTF-8"
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; mend it and run the command again"
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{reason} (unexpected; run again with --debug for the details)"


def _parse_visibly(argv: Sequence[str]) -> Command:
    """`parse`, whose complaints quote arguments as they are: names of files may be among them."""
    if all(word.isprintable() for word in argv):
        return parse(argv)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parse(argv)
    finally:
        for line in said.getvalue().splitlines():
            print(visible(line), file=sys.stderr)


def _show_tracebacks() -> None:
    from nofuss.console import show_traceback

    sys.excepthook = show_traceback


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own error, or one of torch's, its libraries' or the loader's, told by its words."""
    words = (
        *("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc"),
        *("failed to map segment", "could not create a primitive", "can't start new thread"),
    )
    return isinstance(error, MemoryError) or any(each in str(error).lower() for each in words)


def _more_memory() -> str:
    """What to do about it: a limit of the shell is the first suspect where there is one."""
    if sys.platform != "win32":
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return f"this shell allows {limit / 1e6:,.0f} MB: ulimit -v unlimited"
    return "try smaller --batch, --size, --dim or data, or a machine with more"


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
