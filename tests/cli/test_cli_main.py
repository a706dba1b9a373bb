"""The command line itself: help, exit codes, and what is imported when."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types

import pytest

from evenpipe import __version__
from evenpipe.cli import main as cli
from evenpipe.errors import InputError, RunError
from evenpipe.train.config_file import sections
from evenpipe.train.config_help import describe_section


@pytest.fixture
def command(monkeypatch):
    """Function that puts a function in the place of `evenpipe generate`, and runs it; gives the exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def run(function, *arguments):
        module = types.ModuleType("evenpipe.cli.generate")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
        module.run = function
        monkeypatch.setitem(sys.modules, "evenpipe.cli.generate", module)
        return cli.main(["generate", *arguments])

    yield run
    signal.signal(signal.SIGTERM, before)


def raising(error):
    def run(arguments):
        raise error

    return run


def terminated(arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()


ENDINGS = [
    # what the command does, exit code, what standard error shows
    (lambda arguments: 0, 0, ""),
    (lambda arguments: 1, 1, ""),
    (raising(InputError("the field is wrong")), 2, "evenpipe: the field is wrong\n"),
    (raising(RunError("the disk is full")), 3, "evenpipe: the disk is full\n"),
    (raising(OSError(errno.ENOSPC, "No space left on device")), 3, "evenpipe: the output cannot be written: No space "),
    (raising(KeyboardInterrupt()), 130, ""),
    (raising(SystemExit(143)), 143, ""),
    (terminated, 143, ""),
]


@pytest.mark.parametrize(("function", "exit_code", "shown"), ENDINGS)
def test_how_a_command_ends(command, capsys, function, exit_code, shown):
    assert command(function) == exit_code
    error = capsys.readouterr().err
    assert error.startswith(shown)
    assert len(error.splitlines()) == bool(shown)


def test_what_nobody_expected_shows_its_traceback_and_is_a_failed_run(command, capsys):
    assert command(raising(KeyError("lost"))) == 3
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "KeyError: 'lost'" in error


def test_arguments_reach_the_command(command):
    assert command(lambda arguments: arguments.number, "--number", "1") == 1


WRONG = [
    (["--unknown"], "the following arguments are required: COMMAND; evenpipe --help"),
    (["generate"], "the following arguments are required: FOLDER; evenpipe generate --help"),
    (["train"], "the following arguments are required: CONFIG.toml; evenpipe train --help"),
    (
        ["generate", "folder", "--seed", "x"],
        "argument --seed: expected a whole number, not 'x'; evenpipe generate --help",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=str)
def test_wrong_arguments_are_one_sentence(arguments, sentence, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"evenpipe: {sentence} lists the accepted arguments\n"


@pytest.mark.parametrize(
    ("argument", "near"),
    [("--numbre", ", did you mean --number?"), ("--number-of=3", ", did you mean --number?"), ("more", ";")],
)
def test_unknown_arguments_name_the_nearest(command, capsys, argument, near):
    assert command(lambda arguments: 0, argument) == 2
    assert capsys.readouterr().err == (
        f"evenpipe: generate has no argument {argument}{near} evenpipe generate --help lists all of them\n"
    )


@pytest.mark.parametrize("module", ["evenpipe", "evenpipe.cli.main"])
def test_it_runs_as_a_module(module):
    command = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"evenpipe {__version__}\n"


def test_a_terminal_without_a_character_shows_a_question_mark():
    arguments = ["draw", "--schedule", "1f1b", "--devices", "1", "--microbatches", "1", "--unit-seconds", "1e-6"]
    command = [sys.executable, "-m", "evenpipe.cli.main", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "step 3 ?s" in result.stdout


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"evenpipe {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert "2 the input is wrong" in text


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert f"usage: evenpipe {name}" in capsys.readouterr().out


def test_the_help_of_train_lists_every_field(capsys):
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for section in sections().values():
        for field in describe_section(section):
            assert f"  {field.name} = {field.default}   ({field.type})" in text
    assert "train[:1%]" in text


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["train", "--help"], ["--version"], ["train", "missing.toml"]),
        *(["simulate", "--help"], ["search", "--help"], ["check", "missing.csv"]),
        *([name, "--schedule", "1f1b", "--devices", "2", "--microbatches", "2"] for name in ("simulate", "draw")),
    ],
    ids=str,
)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments):
    code = f"""
import sys
from evenpipe.cli.main import main
main({arguments})
heavy = {{"torch", "transformers", "datasets", "tokenizers", "numpy", "tensorboard", "tqdm", "ortools"}}
heavy &= set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_has_gone_ends_the_command_quietly():
    code = """
import sys, types
from evenpipe.cli.main import main
module = types.ModuleType("evenpipe.cli.generate")
module.add_arguments = lambda parser: None
module.run = lambda arguments: print("x" * 1_000_000, flush=True)
sys.modules["evenpipe.cli.generate"] = module
sys.exit(main(["generate"]))
"""
    command = ["bash", "-c", '"$0" -c "$1" | true; exit ${PIPESTATUS[0]}', sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (141, "")
