"""`evenpipe COMMAND ...`: find the command, run it, and turn the outcome into an exit code.

Exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed, 130 and 143 ended by Ctrl-C or SIGTERM.
Only the file of the command is imported, and it imports torch only when it runs.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import inspect
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from evenpipe import __version__
from evenpipe.cli.declarations import accepted, for_typer
from evenpipe.cli.options import COMMON
from evenpipe.errors import InputError, RunError
from evenpipe.given import is_text, plain, plain_lines, shortened, shown

COMMANDS = {
    "explain": "show the imbalance of a model and what would help; a good first command",
    "init": "write a first configuration, from a model and a folder of text, or from an example",
    "train": "train a model",
    "profile": "measure passes and transfers on this hardware, as a cost file for the commands below",
    "simulate": "compute the time, waits and memory of a schedule",
    "draw": "draw a schedule in the terminal, as SVG, HTML or a Perfetto trace",
    "check": "check whether the schedule in a file is sound",
    "estimate": "estimate the memory of every device: its parts, its peak, and whether it fits",
    "plan": "find and explain the fastest configurations that fit a number of GPUs",
    "search": "find the best schedule for a small case",
    "generate": "generate text with an exported model",
    "export": "write a checkpoint as a Hugging Face folder",
}
"""Command -> summary; the module `evenpipe.cli.COMMAND` has its function `run`, whose parameters are the options."""

GROUPS = {"schedule": ("simulate", "draw", "check", "search")}
"""Commands that can also be written behind the name of a group, as in `evenpipe schedule check`."""

OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""Start of an argument that replaces a value of the configuration."""

MOST = 2000
"""Longest line of an error message, in characters."""

USAGE_ERROR: Any = typer.BadParameter.__base__  # typer has no public name for it
SUMMARY = "Pipeline-parallel training for Hugging Face language models, with nothing out of balance."
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EXIT_CODES = "exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. `arguments` defaults to those of the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal whose encoding lacks µ shows a question mark
    try:
        for argument in arguments:
            if not is_text(argument):  # it cannot be printed or stored in a file
                raise InputError(f"the argument {shown(argument)} is not UTF-8, or contains NUL")
        with _Commands.of("evenpipe").make_context("evenpipe", list(arguments)) as context:
            exit_code: int = context.command.invoke(context)
            return exit_code
    except typer.Exit as ending:  # --help and --version
        return ending.exit_code
    except SystemExit as ending:  # from SIGTERM
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
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


# --- commands


class _Shared:
    """What the group and its commands do otherwise than typer: one sentence for wrong arguments, and an epilog whose
    lines stay as they are written."""

    epilog: str | None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse. Raises InputError with one sentence for wrong arguments."""
        try:
            rest: list[str] = super().parse_args(ctx, list(args))  # type: ignore[misc]
        except USAGE_ERROR as error:
            raise InputError(
                f"{_what_is_wrong(error, ctx, args)}; {ctx.command_path} --help lists all options"
            ) from None
        return rest

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add the epilog."""
        if self.epilog:
            formatter.write(f"\n{self.epilog.strip(chr(10))}\n")


class _Commands(_Shared, TyperGroup):
    """A group that imports only the command that runs."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> _Commands:
        """`evenpipe` itself, or one of `GROUPS`."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=SETTINGS)
        summary = f"The commands for a {name}." if name in GROUPS else SUMMARY
        app.callback(cls=cls, help=summary, epilog=EXIT_CODES)(_all)
        group = typer.main.get_command(app)
        assert isinstance(group, _Commands)
        group.names = GROUPS.get(name) or (*COMMANDS, *GROUPS)
        return group

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in their order."""
        return list(self.names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command as --help of the group shows it, without its options."""
        several = GROUPS.get(cmd_name, ())
        return TyperCommand(cmd_name, short_help=COMMANDS.get(cmd_name) or f"a group of {', '.join(several)}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; without arguments, print the help on stderr."""
        if not args:
            print(ctx.get_help(), file=sys.stderr)
            raise typer.Exit(InputError.exit_code)
        rest = super().parse_args(ctx, args)
        if not (rest or ctx._protected_args):
            raise InputError(f"the command is missing; {ctx.command_path} --help lists all commands")
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        """The command that runs, with its options."""
        name, *rest = args
        if name in self.names:
            return name, _Commands.of(name) if name in GROUPS else _Command.of(name), rest
        near = difflib.get_close_matches(name, self.names, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(self.names)};"
        raise InputError(f"there is no command {shown(name)}, {known} {ctx.command_path} --help says what each does")


class _Command(_Shared, TyperCommand):
    """A command of its own file, whose `prepare` may change the arguments, and whose `epilog` ends the help."""

    module: ModuleType
    text: str

    @classmethod
    def of(cls, name: str) -> _Command:
        """The command of `evenpipe.cli.NAME`."""
        module = importlib.import_module(f"evenpipe.cli.{name}")
        settings = SETTINGS | {"allow_extra_args": True}
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        run, text = for_typer(module.run, COMMON)
        app.command(name, cls=cls, help=COMMANDS[name], context_settings=settings)(run)
        command = typer.main.get_command(app)
        assert isinstance(command, _Command)
        command.module, command.text = module, text
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse. Raises InputError for arguments that are left."""
        rest = super().parse_args(ctx, getattr(self.module, "prepare", list)(args))
        if rest:
            raise InputError(
                f"{self.name} has no argument {plain(rest[0])}; {ctx.command_path} --help lists all options"
            )
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if "RANK" not in os.environ:  # torchrun sends it to the other processes; the watch names the failed one
            signal.signal(signal.SIGTERM, _terminated)
        return super().invoke(ctx)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add what the docstring says behind the options, and what takes time to find out."""
        self.epilog = f"{self.text}\n{getattr(self.module, 'epilog', str)()}"
        super().format_epilog(ctx, formatter)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"evenpipe {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)


def _all(*, version: Annotated[bool, VERSION] = False) -> None:
    """Take the options of `evenpipe` itself."""


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM by unwinding the stack, so that child processes end and temporary files are removed."""
    raise SystemExit(128 + number)


# --- wrong arguments


def _what_is_wrong(error: Any, context: Any, arguments: Sequence[str]) -> str:
    """The sentence about an error of typer."""
    kind, parameter = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _no_such_option(error.option_name, context, arguments)
    if parameter is None:  # BadOptionUsage
        return f"{plain(error.option_name)} has no value"
    name = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0]
    if kind == "MissingParameter":
        return f"{name} is missing"
    value = _value_of(parameter.opts, arguments)
    annotation = inspect.signature(context.command.module.run, eval_str=True).parameters[parameter.name].annotation
    return f"{name} is {plain(value)}; it must be {accepted(annotation, value)}"


def _value_of(names: Sequence[str], arguments: Sequence[str]) -> str:
    """The value of an option in the arguments."""
    value = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, rest = argument.partition("=")
        if name in names:
            value = rest if equals else following
    return value


def _no_such_option(name: str, context: Any, arguments: Sequence[str]) -> str:
    """The sentence about an unknown option, which may be a field of the configuration, as in `--steps 3`."""
    command = context.command
    position = next(place for place, word in enumerate(arguments) if word.partition("=")[0] == name or name in word)
    sentence = f"{command.name or context.command_path} has no argument {plain(arguments[position])}"
    if any(parameter.name == "overrides" for parameter in command.params):
        from evenpipe.train.config_file import fields_called

        following = next(
            (word for word in arguments[position + 1 : position + 2] if not word.startswith("--")), "VALUE"
        )
        value = arguments[position].partition("=")[2] or following
        fields = fields_called(name.lstrip("-").replace("-", "_"))
        if fields:
            forms = " or ".join(plain(f"{field}={value}") for field in fields)
            return f"{sentence}; fields of the configuration are written without dashes: {forms}"
    options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"{sentence}, did you mean {near[0]}?" if near else sentence


if __name__ == "__main__":
    sys.exit(main())
