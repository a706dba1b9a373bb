"""`evenpipe COMMAND ...`: find the command, run it, and turn the outcome into an exit code.

Exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed, 130 and 143 ended by Ctrl-C or SIGTERM.
Only the file of the given command is imported, and it imports torch only when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

from evenpipe import __version__
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
"""Command -> summary; the module `evenpipe.cli.COMMAND` has `add_arguments(parser)` and `run(arguments)`."""

OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""Start of an argument that replaces a value of the configuration."""

MOST = 2000
"""Longest line of an error message, in characters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. `arguments` defaults to those of the process."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = name if name in COMMANDS else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal whose encoding lacks µ shows a question mark
    try:
        for argument in arguments:
            if not is_text(argument):  # it cannot be printed or stored in a file
                raise InputError(f"the argument {shown(argument)} is not UTF-8, or contains NUL")
        if command is None and name is not None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)};"
            raise InputError(f"there is no command {shown(name)}, {known} evenpipe --help says what each does")
        parser, of_command = _parser(command)
        if not arguments:
            parser.print_help(sys.stderr)
            return InputError.exit_code
        parsed, unknown = parser.parse_known_args(arguments)
        assert command is not None, "the parser ends without a command"
        if hasattr(parsed, "overrides"):  # argparse takes them only before the first option
            late = [argument for argument in unknown if OVERRIDE.match(argument)]
            parsed.overrides += late
            unknown = [argument for argument in unknown if argument not in late]
        if unknown:
            field = _override_for(unknown) if hasattr(parsed, "overrides") else None
            meant = field or _nearest(unknown[0], of_command)
            raise InputError(f"{command} has no argument {plain(unknown[0])}{meant}")
        if "RANK" not in os.environ:  # torchrun sends it to the other processes; the watch names the failed one
            signal.signal(signal.SIGTERM, _terminated)
        exit_code: int = _module(command).run(parsed)
        return exit_code
    except SystemExit as ending:  # from argparse (0 help, 2 wrong arguments) and from SIGTERM
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


class _Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError with one sentence, without the lines of usage."""
        for kind, words in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value:", f"expected {words}, not")
        raise InputError(f"{message}; {self.prog} --help lists the accepted arguments")

    def _print_message(self, message: str, file: Any = None) -> None:
        lines = plain_lines(message or "").split("\n")
        super()._print_message("\n".join(shortened(line, MOST) for line in lines), file)


def _parser(command: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The main parser and the parser of `command`; other commands get no arguments."""
    parser = _Parser(
        prog="evenpipe",
        description="Pipeline-parallel training for Hugging Face language models, with nothing out of balance.",
        epilog="exit codes: 0 done, 1 the answer is no, 2 the input is wrong, 3 the run failed",
    )
    parser.add_argument("--version", action="version", version=f"evenpipe {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    of_command = parser
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=line, description=line, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == command:
            _module(name).add_arguments(subparser)
            of_command = subparser
    return parser, of_command


def _nearest(argument: str, parser: argparse.ArgumentParser) -> str:
    """The end of a sentence about an unknown argument: the nearest option, and how to list all of them."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    near = difflib.get_close_matches(argument.partition("=")[0], options, n=1, cutoff=0.6)
    return (f", did you mean {near[0]}?" if near else ";") + f" {parser.prog} --help lists all of them"


def _override_for(unknown: Sequence[str]) -> str | None:
    """The end of a sentence about an option that is a field of the configuration, as `--steps 3`, or None."""
    from evenpipe.train.config_file import fields_called

    name, equals, value = unknown[0].lstrip("-").partition("=")
    if not equals:
        value = next((argument for argument in unknown[1:2] if not argument.startswith("--")), "VALUE")
    fields = fields_called(name.replace("-", "_"))
    if not fields:
        return None
    forms = " or ".join(plain(f"{field}={value}") for field in fields)
    return f"; fields of the configuration are written without dashes: {forms}"


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"evenpipe.cli.{command}")


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM by unwinding the stack, so that child processes end and temporary files are removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
