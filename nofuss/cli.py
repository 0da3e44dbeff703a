"""The `nofuss` program: the table of commands, from a command line to a call, exit codes."""

import ctypes
import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnusedCliTokensError,
)
from rich.console import Console

from nofuss import __version__
from nofuss.errors import NofussError, UsageError, one_line, unknown_name

COMMANDS = {
    "train": "Learn a distance from labelled data and score it on classes not seen in training.",
    "evaluate": "Score a run: Recall@K, MAP@R, NMI on classes it has not seen.",
    "embed": "Embed data with a run's model and write vectors, names and labels to a file.",
    "demo": "Train on half of the built-in characters, then search among the other half.",
    "serve": "Serve a page to search in the run's index.",
    "index": "Embed a folder for search: add it to the run's index, or update what changed.",
    "search": "Find the most similar items in the run's index.",
    "doctor": "Find problems in data: unreadable files, copies, doubtful labels.",
    "export": "Write a run's model as an ONNX file, checked against the original.",
    "push": "Publish a run's model on the Hugging Face Hub.",
    "backbones": "List the networks that train --backbone takes, and their licences.",
    "compare": "Compare runs on the same items, with intervals.",
    "reproduce": "Reproduce the paper's tables and figures, and put its numbers beside ours.",
}
IN_SEVERAL_PROCESSES = {"train", "evaluate", "embed", "demo", "index", "reproduce"}
WIDEST = 100
"""Columns of a help page: longer lines are hard to read."""

_NO_MEMORY = re.compile(  # as torch and its libraries say it
    "can(no|')t allocate memory|out of memory|bad_alloc|failed to map segment"
    "|could not create a primitive|can't start new thread",
    re.IGNORECASE,
)

Call = partial[Any]


def parse(argv: Sequence[str]) -> tuple[str, Call]:
    """Return the command and the call that the command line asks for; UsageError on misuse.

    Only the module of that command is imported. The name is empty for --help and --version.
    """
    name = argv[0]
    if not name.startswith("-") and name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)

    def look(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        for argument in (each for each in arguments if each.tokens):
            if int in (argument.hint, *get_args(argument.hint)):
                for token in argument.tokens:  # cyclopts would round 2.5
                    if not re.fullmatch(r"[+-]?\d+", token.value):
                        text = f"{argument.name} is {token.value}; expected a whole number"
                        raise UsageError(text)

    app = _app()
    app.config = (look,)
    if name in COMMANDS:
        app[name].help = None  # its docstring says more than the table
    try:
        command, bound, _ = app.parse_args(
            argv, console=_page(), exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        message = _misuse(error)
        hint = "" if message.endswith("?") else ";"
        raise UsageError(f"{message.rstrip('.')}{hint} see nofuss {name} --help") from None
    call = partial(command, *bound.args, **bound.kwargs)
    return name if command.__module__.startswith("nofuss.") else "", call


def _misuse(error: CycloptsError) -> str:
    """Return what is wrong with a command line."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        is_there = bool(error.argument.tokens) or error.keyword is not None
        return f"{error.argument.name} {'needs a value' if is_there else 'is missing'}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"too many arguments: {' '.join(error.unused_tokens)}"
    message = one_line(error)
    return message[0].lower() + message[1:]


def _app() -> App:
    """Return all commands, none of which is imported."""
    app = App(
        name="nofuss",
        help="Learn a distance that works on classes never seen before.",
        help_epilogue="`nofuss COMMAND --help` shows the options of a command. "
        "With any command, `--verbose` says more, and `--debug` shows the traceback of an error.",
        help_format="markdown",
        version=f"nofuss {__version__}",
        group_parameters=Group("Options", sort_key=1),
        default_parameter=Parameter(negative_bool=(), negative_iterable=(), show_default=_shown),
    )
    for number, (name, text) in enumerate(COMMANDS.items()):
        place = f"nofuss.commands.{name}:main"
        app.command(place, name=name, help=text, help_epilogue="", sort_key=number)
    return app


def _page(*, stderr: bool = False) -> Console:
    return Console(width=min(WIDEST, Console().width), stderr=stderr, highlight=False)


def _shown(default: object) -> str | None:
    """Return a default as it is typed; None where there is nothing to type."""
    if default is None or isinstance(default, bool):
        return None
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def run(name: str, call: Call, *, verbose: bool = False) -> None:
    """Do what the command asks; under torchrun all processes do it together, and one speaks."""
    if sys.platform == "win32":
        raise UsageError(
            "the commands need what Windows does not have; run them in WSL 2 (the losses and "
            "scores work on Windows too, from Python)"
        )
    from nofuss.commands import console

    log = logging.getLogger("nofuss")
    warnings.showwarning = lambda message, *_, **__: log.warning(str(message))
    warnings.filterwarnings("ignore", module="PIL")  # its notes on odd headers
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home it can't write to
    is_json = bool(call.keywords.get("json"))
    with console.speaking(as_json=is_json, aloud=_rank() == "0", verbose=verbose):
        from nofuss.distributed import processes

        if processes.under_torchrun() and name not in IN_SEVERAL_PROCESSES:
            raise UsageError(f"nofuss {name} works in one process; leave torchrun out")
        with processes.joined():
            if processes.world() > 1:
                log.info(f"{processes.world()} processes")
            call()


def main(argv: Sequence[str] | None = None) -> int:
    """The `nofuss` program; returns the exit code: 0, 1 runtime, 2 usage or data, 130 stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug, verbose = "--debug" in arguments, "--verbose" in arguments
    words = [word for word in arguments if word not in ("--debug", "--verbose")]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may have characters it can't show
            stream.reconfigure(errors="backslashreplace")
    if not words:
        _app().help_print(console=_page(stderr=True))
        return 2
    try:
        name, call = parse(words)
        if not name:
            call()
            return 0
        _keep_freed_memory()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C
        run(name, call, verbose=verbose)
    except NofussError as error:
        return _fail(str(error), error.exit_code, error if debug else None)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(_explain(error), 1, error if debug else None)
    return 0


def _explain(error: Exception) -> str:
    """Return one line about an error that no other code handled."""
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return "not enough memory; give less data, or train with a smaller --batch-size or --size"
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; fix it and run the command again"
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{reason} (unexpected; run again with --debug for the details)"


def _fail(message: str, code: int, error: Exception | None = None) -> int:
    """Print a traceback, and one line without passwords of URLs; return the exit code."""
    from nofuss.commands.console import fail, show_traceback

    if error is not None:
        show_traceback(error)
    message = re.sub(r"(://[^/@:\s]*:)\S*@", r"\1***@", message)
    fail(message if _rank() == "0" else f"rank {_rank()}: {message}")
    return code


def _rank() -> str:
    """Return the number of this process, before torch is loaded to ask."""
    return os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"


def _keep_freed_memory() -> None:
    """Ask glibc to keep freed memory: mapping it again costs as much as the arithmetic.

    Training a convolutional network is then nearly twice as fast on a CPU. Memory stays at its
    peak, so this is for the program, never for the library.
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
