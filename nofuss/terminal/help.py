"""Help pages of the commands, made from the same signatures and docstrings that tyro parses.

tyro's own pages keep the line breaks of docstrings, list `None` among the choices, and have one
box for all options. Here texts are wrapped to the terminal, and options come in groups.
"""

import ast
import dataclasses
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, Suppress

_METAVARS = {int: "N", float: "X", str: "NAME"}
_WIDEST, _COLUMN = 100, 24  # of the page, and of the options in it


class Option(NamedTuple):
    """A line of a help page."""

    name: str
    """The name in Python; a flag has hyphens for its underscores."""
    invocation: str
    """As on the command line: "--out RUN"."""
    text: str
    """What it does, and its default."""
    positional: bool = False
    optional: bool = True


def page(
    main: Callable[..., object],
    *,
    prog: str,
    groups: Mapping[str, Sequence[str]],
    width: int | None = None,
) -> str:
    """Return the help of a command.

    groups: heading → names of options; one heading has none, and gets all that are left.
    """
    width = min(_WIDEST, width or shutil.get_terminal_size().columns)
    options = options_of(main)
    places = [option for option in options if option.positional]
    words = [f"[{o.invocation}]" if o.optional else o.invocation for o in places]
    words += [o.invocation for o in options if not o.optional and not o.positional]
    blocks = [" ".join(["usage:", prog, *words, "[options]"])]
    blocks += [textwrap.fill(paragraph, width) for paragraph in _description(main)]
    if places:
        blocks.append(_listed(places, width))
    named = {option.name: option for option in options if not option.positional}
    grouped = {name for names in groups.values() for name in names}
    for heading, names in (groups or {"Options": ()}).items():
        chosen = [named[name] for name in names]
        if not names:
            chosen += [option for name, option in named.items() if name not in grouped]
            chosen += [
                Option("debug", "--debug", "Show the traceback of an error."),
                Option("help", "-h, --help", "Show this page."),
            ]
        blocks.append(f"{_bold(heading)}:\n{_listed(chosen, width)}")
    return "\n\n".join(blocks)


def switches_of(main: Callable[..., object]) -> frozenset[str]:
    """Return the names of options that are on, off, or not given: `bool | None`."""
    return frozenset(field.name for field in _fields(main) if field.is_switch)


def options_of(main: Callable[..., object]) -> list[Option]:
    """Return all options of a command in the order of its signature."""
    return [_option(field) for field in _fields(main)]


class _Field(NamedTuple):
    name: str
    type: Any
    default: Any
    text: str
    markers: tuple[Any, ...]

    @property
    def required(self) -> bool:
        return self.default in (inspect.Parameter.empty, dataclasses.MISSING)

    @property
    def is_switch(self) -> bool:
        return bool in get_args(self.type)


def _fields(main: Callable[..., object]) -> list[_Field]:
    """Return the parameters of a function; one that is a dataclass gives its fields instead."""
    texts, fields = _argument_texts(inspect.getdoc(main) or ""), list[_Field]()
    hints = get_type_hints(main, include_extras=True)
    for name, parameter in inspect.signature(main).parameters.items():
        kind, markers = _unwrapped(hints[name])
        if dataclasses.is_dataclass(kind):
            fields += _dataclass_fields(kind)
        elif get_args(Suppress[int])[1] not in markers:
            fields.append(_Field(name, kind, parameter.default, texts.get(name, ""), markers))
    return fields


def _dataclass_fields(cls: Any) -> list[_Field]:
    """Return the fields of a dataclass; the string below a field is its text."""
    texts, before = dict[str, str](), ""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[before] = str(node.value.value)
    hints, fields = get_type_hints(cls, include_extras=True), list[_Field]()
    for field in dataclasses.fields(cls):
        kind, markers = _unwrapped(hints[field.name])
        text = texts.get(field.name, "")
        fields.append(_Field(field.name, kind, field.default, text, markers))
    return fields


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and what `Annotated` adds to it."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    kind, *markers = get_args(hint)
    return kind, tuple(markers)


def _option(field: _Field) -> Option:
    settings = next((m for m in field.markers if hasattr(m, "help_behavior_hint")), None)
    flag, text = field.name.replace("_", "-"), " ".join(field.text.split())
    metavar = (settings.metavar if settings else None) or _metavar(field.type)
    hint = settings.help_behavior_hint if settings else None
    text = f"{text} {_default(field) if hint is None else hint}".strip()
    if Positional in field.markers:
        several = get_origin(field.type) is tuple
        shown = f"{metavar} …" if several else metavar
        return Option(field.name, shown, text, positional=True, optional=not field.required)
    if field.type is bool:
        return Option(field.name, f"--no-{flag}" if field.default is True else f"--{flag}", text)
    if field.is_switch:
        return Option(field.name, f"--{flag}, --no-{flag}", text)
    aliases = settings.aliases if settings and settings.aliases else ()
    invocation = f"{', '.join((*aliases, f'--{flag}'))} {metavar}"
    return Option(field.name, invocation, text, optional=not field.required)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    if get_origin(kind) in (Union, UnionType, tuple):
        first, *_ = (part for part in get_args(kind) if part is not type(None))
        return _metavar(first)
    return _METAVARS.get(kind, "PATH")


def _default(field: _Field) -> str:
    if field.required:
        return "" if Positional in field.markers else "(required)"
    if field.default is None or isinstance(field.default, bool):
        return ""
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"(default: {' '.join(shown)})"


def _argument_texts(docstring: str) -> dict[str, str]:
    """Return the texts in the section "Args:" of a docstring."""
    _, _, section = docstring.partition("\nArgs:\n")
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], entries[1::2], strict=True))


def _description(main: Callable[..., object]) -> list[str]:
    """Return the paragraphs of a docstring up to the arguments."""
    text = (inspect.getdoc(main) or "").partition("\nArgs:\n")[0]
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _listed(options: Iterable[Option], width: int) -> str:
    """Return a line or more an option: its invocation on the left, its text on the right."""
    lines = list[str]()
    for option in options:
        wrapped = textwrap.wrap(option.text, width - _COLUMN - 2, break_on_hyphens=False) or [""]
        if len(option.invocation) > _COLUMN - 2:
            lines.append(f"  {option.invocation}")
        else:
            lines.append(f"  {option.invocation:<{_COLUMN}}{wrapped.pop(0)}".rstrip())
        lines += [f"  {'':<{_COLUMN}}{line}" for line in wrapped]
    return "\n".join(lines)


def _bold(text: str) -> str:
    shown = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[1m{text}\033[0m" if shown else text
