"""`evenpipe COMMAND ...`: find the command, run it, and turn the outcome into an exit code.

Exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed, 130 and 143 ended by Ctrl-C or SIGTERM.
Only the file of the command is imported, and it imports torch only when it runs.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Annotated, Any

import typer

from evenpipe import __version__
from evenpipe.cli.declarations import accepted, for_typer
from evenpipe.cli.options import COMMON
from evenpipe.errors import InputError, RunError
from evenpipe.given import is_text, plain, plain_lines, shortened, shown
from evenpipe.words import RENAMED, show

COMMANDS = {
    "explain": "show the imbalance of a model and what would help; a good first command",
    "init": "write a first configuration, from a model and a folder of text, or from an example",
    "train": "train a model",
    "doctor": "examine this machine: versions, links, gradients, transfers, and steps against predictions",
    "profile": "measure passes and transfers on this hardware, as a cost file for the commands below",
    "simulate": "compute the time, waits and memory of a schedule",
    "draw": "draw a schedule in the terminal, as SVG, HTML or a Perfetto trace",
    "check": "check whether the schedule in a file is sound",
    "estimate": "estimate the memory of every device: its parts, its peak, and whether it fits",
    "plan": "find and explain the fastest configurations that fit a number of GPUs",
    "search": "find the best schedule for a small case",
    "generate": "generate text with an exported model",
    "export": "write a checkpoint as a Hugging Face folder",
    "schema": "print the JSON schema of a configuration or another file, for editors",
}
"""Command -> summary; the function `run` of the module `evenpipe.cli.COMMAND` declares and implements it."""

GROUPS = {"schedule": ("simulate", "draw", "check", "search")}
"""Commands that can also be written after the name of a group, as in `evenpipe schedule check`."""

OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""Start of an argument that replaces a value of the configuration."""

MOST = 2000
"""Longest line of an error message, in characters."""

SUMMARY = "Pipeline-parallel training for Hugging Face language models, with vocabulary layers on all devices."
EXIT_CODES = "exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed"
TYPER: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "no_args_is_help": True}
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
MORE = {"allow_extra_args": True}  # so that our own message refuses them
USAGE_ERROR: Any = typer.BadParameter.__base__  # typer has no public name for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. `arguments` defaults to those of the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal whose encoding lacks µ shows a question mark
    try:
        for argument in arguments:
            if not is_text(argument):  # it cannot be printed or stored in a file
                raise InputError(f"the argument {shown(argument)} is not UTF-8, or contains NUL")
        module = _module_of(arguments)
        arguments = getattr(module, "prepare", list)(arguments)
        app = _app(module, wants_help=not {"-h", "--help"}.isdisjoint(arguments))
        if "RANK" not in os.environ:  # torchrun sends it to the other processes; the watch names the failed one
            signal.signal(signal.SIGTERM, _terminated)
        with app.make_context("evenpipe", list(arguments)) as context:
            exit_code: int = context.command.invoke(context)
            return exit_code
    except typer.Exit as ending:  # --help and --version
        return ending.exit_code
    except SystemExit as ending:  # from SIGTERM
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help(), file=sys.stderr)
        else:
            _say(_what_is_wrong(error, arguments))
        return InputError.exit_code
    except (InputError, RunError) as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _say(f"{error.filename or 'the output'} cannot be written: {error.strerror}")
            return RunError.exit_code
        print(plain_lines(traceback.format_exc()), end="", file=sys.stderr)
        _say("the run failed with the error above")
        return RunError.exit_code


def _say(text: str) -> None:
    """Print an error on stderr, with control characters escaped and long lines shortened."""
    print("\n".join(shortened(line, MOST) for line in f"evenpipe: {plain_lines(text)}".split("\n")), file=sys.stderr)


def _module_of(arguments: Sequence[str]) -> ModuleType | None:
    """The module of the command; None without one. Raises InputError for an unknown name."""
    path, known = "evenpipe", (*COMMANDS, *GROUPS)
    for name in arguments:
        if name.startswith("-"):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            which = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)};"
            raise InputError(f"there is no command {shown(name)}, {which} {path} --help says what each does")
        if name in COMMANDS:
            return importlib.import_module(f"evenpipe.cli.{name}")
        path, known = f"evenpipe {name}", GROUPS[name]
    return None


def _app(module: ModuleType | None, *, wants_help: bool) -> Any:
    """`evenpipe` with the options of the command of `module`. All others are listed, but not imported."""
    app = typer.Typer(**TYPER, help=SUMMARY, epilog=EXIT_CODES, context_settings=SETTINGS)
    app.callback()(_no_command)
    groups = {name: typer.Typer(**TYPER) for name in GROUPS}
    for name, summary in COMMANDS.items():
        run: Any = _not_imported
        epilog = ""
        if module is not None and module.__name__ == f"evenpipe.cli.{name}":
            run = for_typer(module.run, COMMON)
            if wants_help:
                epilog = f"{run.__doc__}\n\n{getattr(module, 'epilog', str)()}".strip("\n")
                epilog = re.sub(r"(^|\n\n+)", "\\1\b\n", epilog)  # \b keeps the lines of a paragraph
        for parent in (app, *(group for of, group in groups.items() if name in GROUPS[of])):
            parent.command(name, help=summary, short_help=summary, epilog=epilog, context_settings=MORE)(run)
    for name, group in groups.items():
        app.add_typer(group, name=name, help=f"{', '.join(GROUPS[name])}, by topic")
    return typer.main.get_command(app)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"evenpipe {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)


def _no_command(*, version: Annotated[bool, VERSION] = False) -> None:
    """Take the options before a command."""


def _not_imported() -> None:
    """Stand for a command that is only listed."""


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM by unwinding the stack, so that child processes end and temporary files are removed."""
    raise SystemExit(128 + number)


def _what_is_wrong(error: Any, arguments: Sequence[str]) -> str:
    """An error of typer in one sentence."""
    kind, parameter, context = type(error).__name__, getattr(error, "param", None), error.ctx
    path = context.command_path if context else f"evenpipe {next(word for word in arguments if word in COMMANDS)}"
    options = f"{path} --help lists all options"
    if kind == "NoSuchOption":
        return f"{_no_such_option(error.option_name, context, arguments)} {options}"
    if kind == "BadOptionUsage":
        has_one = any(word.startswith(f"{error.option_name}=") for word in arguments)
        return f"{error.option_name} {'takes' if has_one else 'has'} no value; {options}"
    if parameter is None:
        return f"the command is missing; {options}"
    name = parameter.metavar if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
    if kind == "MissingParameter":
        return f"{name} is missing; {options}"
    value = _value_of(parameter.opts, arguments)
    if parameter.param_type_name == "argument" and (quoted := re.search(r"'(.*)' is not", error.message)):
        value = quoted[1]
    shown_value = value if re.fullmatch(r"[+-]?[\d.]+", value) else show(value)
    return f"{name} is {shown_value}; it must be {accepted(context.command.callback, parameter.name, value)}"


def _value_of(names: Sequence[str], arguments: Sequence[str]) -> str:
    """The value of an option in the arguments."""
    value = ""
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, text = argument.partition("=")
        if name in names:
            value = text if equals else following
    return value


def _no_such_option(name: str, context: Any, arguments: Sequence[str]) -> str:
    """The sentence about an unknown option, which may be a field of the configuration, as in `--steps 3`."""
    command = context.command
    position = next(index for index, word in enumerate(arguments) if word.partition("=")[0] == name or name in word)
    sentence = f"{context.info_name} has no argument {plain(arguments[position])}"
    if any(parameter.name == "overrides" for parameter in command.params):
        from evenpipe.train.config_file import fields_called

        following = next(
            (word for word in arguments[position + 1 : position + 2] if not word.startswith("--")), "VALUE"
        )
        value = arguments[position].partition("=")[2] or following
        fields = fields_called(name.lstrip("-").replace("-", "_"))
        if fields:
            forms = " or ".join(plain(f"{field}={value}") for field in fields)
            return f"{sentence}; fields of the configuration are written without dashes: {forms};"
    options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    today = f"--{RENAMED.get(name.lstrip('-').replace('-', '_'), '').replace('_', '-')}"
    near = [today] if today in options else difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"{sentence}, did you mean {near[0]}?" if near else f"{sentence};"


if __name__ == "__main__":
    sys.exit(main())
