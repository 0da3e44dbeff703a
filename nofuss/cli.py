"""The `nofuss` program: the table of commands, from a command line to a call, exit codes."""

import contextlib
import ctypes
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from typing import Any, NoReturn

import tyro

from nofuss import __version__
from nofuss.errors import NofussError, UsageError, unknown_name, visible
from nofuss.terminal import help as help_page
from nofuss.terminal.interrupt import ending_in_time

if sys.platform != "win32":
    import resource  # here: when memory is short there may be none left for it


COMMANDS = {
    "train": "Learn a distance from labelled data and score it on classes not seen in training.",
    "evaluate": "Score a run: Recall@K, MAP@R, NMI on classes it has not seen.",
    "embed": "Embed data with a run's model and write vectors, names and labels to a file.",
    "demo": "Train on half of the built-in characters, then search among the other half.",
    "serve": "Open a page to search in the run's index or its test items.",
    "index": "Embed a folder for search: add it to the run's index, or update what changed.",
    "search": "Find what is most like a picture: in the run's index or its test items.",
    "doctor": "Look for what is wrong with data: unreadable files, copies, doubtful labels.",
    "export": "Write a run's model as an ONNX file, checked against the original.",
    "push": "Publish a run's model on the Hugging Face Hub.",
    "compare": "Compare runs on the same items, with intervals.",
    "reproduce": "Reproduce the paper's tables and figures, and put its numbers beside ours.",
}
NEEDED_BYTES = 1200 * 2**20
"""Address space that torch, scikit-learn and the smallest training take with two threads."""
IN_SEVERAL_PROCESSES = {"train", "evaluate", "embed", "demo", "index", "reproduce"}

OTHER_NAMES = {
    **dict.fromkeys(("--rate", "--learning-rate", "--backbone-lr"), "--lr"),
    **dict.fromkeys(("--head-rate", "--lr-head"), "--head-lr"),
    **dict.fromkeys(("--proxy-rate", "--lr-proxies"), "--proxy-lr"),
    **dict.fromkeys(("--bs", "--batch"), "--batch-size"),
    **dict.fromkeys(("--embedding-size", "--embedding-dim", "--dimension"), "--dim"),
    **dict.fromkeys(("--output", "--output-dir", "--out-dir", "-o"), "--out"),
    **dict.fromkeys(("--workers", "--jobs", "-j"), "--num-workers"),
    **dict.fromkeys(("--num-epochs", "--max-epochs"), "--epochs"),
    **dict.fromkeys(("--image-size", "--img-size"), "--size"),
    **dict.fromkeys(("--model", "--arch"), "--backbone"),
    **dict.fromkeys(("--optim", "--opt"), "--optimizer"),
    **dict.fromkeys(("--wd", "--decay"), "--weight-decay"),
    "--scheduler": "--schedule",
    "--gpu": "--device",
}
"""Names of options elsewhere → ours."""

Call = partial[None]


def parse(argv: Sequence[str]) -> tuple[str, Call]:
    """Return the command and the call that the command line asks for; exits with 2 on misuse.

    Only the module of that command is imported: `nofuss --help` does not load torch.
    """
    if argv and argv[0] == "--version":
        print(f"nofuss {__version__}")
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        _overview(argv)
    name, *rest = argv
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    module = import_module(f"nofuss.commands.{name}")
    main = module.main
    if {"-h", "--help"} & set(rest):
        groups = getattr(module, "GROUPS", {})
        print(help_page.page(main, prog=f"nofuss {name}", groups=groups))
        raise SystemExit(0)
    if sys.platform == "win32":
        raise UsageError(
            "the commands open folders and lock files in ways that Windows does not have; "
            "run them in WSL 2 (the losses and scores work on Windows too, from Python)"
        )
    _check_address_space()
    _check_other_names(name, main, rest)
    rest = _spelled_out(rest, help_page.switches_of(main))

    @wraps(main)
    def bind(*args: Any, **kwargs: Any) -> Call:
        return partial(main, *args, **kwargs)

    call = tyro.cli(bind, prog=f"nofuss {name}", args=rest, config=(tyro.conf.FlagCreatePairsOff,))
    assert isinstance(call, partial)
    return name, call


def _check_other_names(name: str, main: Callable[..., object], words: Sequence[str]) -> None:
    """Raise UsageError for an option that goes by another name here."""
    for word in words:
        flag = word.split("=")[0]
        ours = OTHER_NAMES.get(flag)
        if ours is not None:
            known = {word for o in help_page.options_of(main) for word in o.invocation.split()}
            if ours in known and flag not in known:
                raise UsageError(
                    f"unknown option {flag}; it is {ours} here, see nofuss {name} --help"
                )


def _spelled_out(words: Sequence[str], switches: frozenset[str]) -> list[str]:
    """Return the words with `--x` and `--no-x` as `--x True` and `--x False` for `bool | None`."""
    spelled = list[str]()
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag = word.removeprefix("--").replace("-", "_")
        if word.startswith("--no-") and flag.removeprefix("no_") in switches:
            spelled += [f"--{word.removeprefix('--no-')}", "False"]
        elif word.startswith("--") and flag in switches and following not in ("True", "False"):
            spelled += [word, "True"]
        else:
            spelled.append(word)
    return spelled


def _overview(argv: Sequence[str]) -> NoReturn:
    """Show the commands, a line each, and exit: 0 if asked for, 2 if no command was given."""
    width = max(map(len, COMMANDS))
    shown = [
        "usage: nofuss COMMAND [-h] …",
        "",
        "Learn a distance that works on classes never seen before.",
        "",
        *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
        "",
        "nofuss COMMAND --help shows the options of a command, nofuss --version the version;",
        "--debug with any command shows the traceback of an error.",
    ]
    asked = bool({"-h", "--help"} & set(argv))
    print(*shown, sep="\n", file=sys.stdout if asked else sys.stderr)
    raise SystemExit(0 if asked else 2)


def given_settings(argv: Sequence[str]) -> frozenset[str]:
    """Names of the settings that the command line gives, whatever their values."""
    flags = (word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--"))
    return frozenset(flag.removeprefix("no_") for flag in flags)


def run(name: str, call: Call) -> None:
    """Do what the command asks; under torchrun all processes do it together, and one speaks."""
    from nofuss.distributed import processes
    from nofuss.terminal import console

    tell = console.aside if call.keywords.get("json") else console.warn
    warnings.showwarning = lambda message, *_, **__: tell(str(message))
    warnings.filterwarnings("ignore", module="PIL")  # its notes on odd headers
    if processes.under_torchrun() and name not in IN_SEVERAL_PROCESSES:
        raise UsageError(f"nofuss {name} works in one process; leave torchrun out")
    with ending_in_time(), processes.joined():
        console.speak(processes.first())
        if processes.world() > 1:
            console.aside(f"{processes.world()} processes")
        call()


def main(argv: Sequence[str] | None = None) -> int:
    """The `nofuss` program; returns the exit code: 0, 1 runtime, 2 usage or data, 130 stopped."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may have characters it can't show
            stream.reconfigure(errors="backslashreplace")
    try:
        name, call = _parse_visibly([a for a in arguments if a != "--debug"])
        if name == "train":
            call = partial(call, given=given_settings(arguments))
        _keep_freed_memory()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C
        run(name, call)
    except NofussError as error:
        if debug:
            _show_tracebacks()
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            _show_tracebacks()
            raise
        return _fail(_explain(error), 1)
    return 0


def _explain(error: Exception) -> str:
    """Return one line about an error that no other code handled."""
    if _is_out_of_memory(error):
        return f"not enough memory; {_more_memory()}"
    if isinstance(error, UnicodeEncodeError):
        name, encoding = ascii(error.object), sys.getfilesystemencoding()
        return (
            f"file names are in {encoding} here, which can't represent {name}; set LC_ALL=C.UTF-8"
        )
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; fix it and run the command again"
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{reason} (unexpected; run again with --debug for the details)"


def _parse_visibly(argv: Sequence[str]) -> tuple[str, Call]:
    """Call `parse`; escape control characters in its messages, which quote the arguments.

    Passwords in URLs are not quoted: where a message is due, it is made of arguments without them.
    """
    without_passwords = [re.sub(r"(://[^/@:]*:).*@", r"\1***@", word) for word in argv]
    if without_passwords != list(argv):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return parse(argv)
        except (NofussError, SystemExit):
            return _parse_visibly(without_passwords)
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
    from nofuss.terminal.console import show_traceback

    sys.excepthook = show_traceback


def _is_out_of_memory(error: Exception) -> bool:
    """Recognise Python's own error, and those of torch and its libraries by their text."""
    words = (
        *("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc"),
        *("failed to map segment", "could not create a primitive", "can't start new thread"),
    )
    return isinstance(error, MemoryError) or any(each in str(error).lower() for each in words)


def _check_address_space() -> None:
    """Raise MemoryError if the shell allows less than torch and its libraries need.

    They do not fail in order: an import ends in a SystemError, and OpenBLAS waits forever.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < NEEDED_BYTES:
        raise MemoryError


def _more_memory() -> str:
    """Suggest a cure: a memory limit of the shell first, if there is one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return f"this shell allows {limit / 1e6:,.0f} MB: ulimit -v unlimited"
    return "try smaller --batch-size, --size, --dim or data, or a machine with more"


def _fail(message: str, code: int) -> int:
    from nofuss.terminal.console import fail

    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    fail(message if rank == "0" else f"rank {rank}: {message}")
    return code


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
