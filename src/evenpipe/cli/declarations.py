"""Commands as functions: the signature has the arguments and options, the docstring describes them.

    def run(file: str, *, limit: Count = 3, output: Path | None = None, json_: bool = False) -> int:
        '''Say in a line what the command does.

        FILE.csv             what it reads
        --limit N            most lines
        -o, --output FILE    where it writes

        What else --help says.
        '''

Positional parameters are arguments, described in their order; keyword-only parameters are options, those of type bool
flags. The fields of a keyword-only dataclass are options, too: commands with a parameter of that type share them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from evenpipe.errors import InputError
from evenpipe.given import plain

Count = Annotated[int, typer.Option(min=1)]
"""The type of an option that is a whole number of at least 1."""

_ENTRY = re.compile(
    r"^(?P<names>(?:-\w, )?--[\w-]+|(?=[A-Z\[]))(?P<metavar> ?\S+)?  +(?P<text>\S.*(?:\n  +\S.*)*)\n?", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The description of an option, with its names, or of an argument, without names."""

    names: tuple[str, ...]
    metavar: str | None
    text: str


def for_typer(run: Callable[..., int], common: str) -> Callable[..., int]:
    """A command with the annotations that typer reads, and with the rest of its docstring. `common`: descriptions of
    options that the docstring does not describe."""
    text = inspect.getdoc(run) or ""
    entries = [*_entries(common), *_entries(text)]
    described = {name.lstrip("-").replace("-", "_"): entry for entry in entries for name in entry.names}
    arguments = (entry for entry in entries if not entry.names)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(run, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            group = groups[parameter.name] = parameter.annotation
            parameters += inspect.signature(group, eval_str=True).parameters.values()  # type: ignore[arg-type]
        else:
            parameters.append(parameter)
    for index, parameter in enumerate(parameters):
        kind, limits = _unwrapped(parameter.annotation)
        if parameter.kind is parameter.KEYWORD_ONLY:
            entry = described[parameter.name.rstrip("_")]
            info: Any = typer.Option(*entry.names, metavar=entry.metavar, help=entry.text, **limits)
        else:
            entry = next(arguments)
            info = typer.Argument(metavar=entry.metavar, help=entry.text)
        parameters[index] = parameter.replace(annotation=Annotated[kind, info], kind=parameter.KEYWORD_ONLY)

    def command(context: typer.Context, **values: Any) -> int:
        if context.args:
            name, options = context.info_name, f"{context.command_path} --help lists all options"
            raise InputError(f"{name} has no argument {plain(context.args[0])}; {options}")
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return run(**values, **made)

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = _ENTRY.sub("", text.partition("\n\n")[2])
    return command


def _entries(text: str) -> list[_Entry]:
    """The descriptions in a docstring."""
    return [
        _Entry(
            tuple(re.findall(r"--?[\w-]+", match["names"])),
            match["metavar"] and match["metavar"].strip(),
            " ".join(match["text"].split()),
        )
        for match in _ENTRY.finditer(inspect.cleandoc(text))
    ]


def _unwrapped(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """The type of an option without numeric limits, and the limits."""
    members = [member for member in get_args(annotation) if member is not NoneType]
    optional = NoneType in get_args(annotation)
    kind = members[0] if optional and len(members) == 1 else annotation
    limits = {}
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
        limits = {name: getattr(info, name) for name in ("min", "max") if getattr(info, name) is not None}
    return (kind | None if optional else kind), limits


def accepted(command: Callable[..., int], option: str, value: str) -> str:
    """The values that an option of a `for_typer` command accepts, in words. `value`: the value it got instead."""
    kind, info = get_args(inspect.signature(command).parameters[option].annotation)
    if NoneType in get_args(kind):
        kind = next(member for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    words = "" if info.min is None else f"at least {info.min}"
    words += "" if info.max is None else f", at most {info.max}"
    if words and re.fullmatch(r"[+-]?\d+", value):
        return words
    return {int: "a whole number", float: "a number"}[kind] + (f" of {words}" if words else "")
