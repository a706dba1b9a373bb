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
from evenpipe.train.config_help import configuration_help


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


def test_how_a_command_ends(command, capsys):
    for function, exit_code, shown in ENDINGS:
        assert command(function) == exit_code
        error = capsys.readouterr().err
        assert error.startswith(shown) and len(error.splitlines()) == bool(shown)
    assert command(raising(KeyError("lost"))) == 3, "what nobody expected shows its traceback and is a failed run"
    error = capsys.readouterr().err
    assert "Traceback" in error and "KeyError: 'lost'" in error
    assert command(lambda arguments: arguments.number, "--number", "1") == 1


def test_it_runs_as_a_module():
    for module in ("evenpipe", "evenpipe.cli.main"):
        command = [sys.executable, "-m", module, "--version"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert output == f"evenpipe {__version__}\n"


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
    assert all(name in text for name in cli.COMMANDS) and "2 the input is wrong" in text
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in cli.COMMANDS)
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"usage: evenpipe {name}" in text
        assert name != "train" or configuration_help() in text


def test_nothing_heavy_is_imported_before_it_is_needed():
    schedule = ["--schedule", "1f1b", "--devices", "2", "--microbatches", "2"]
    commands = [["--help"], ["train", "--help"], ["train", "missing.toml"], ["search", "--help"], ["check", "no.csv"]]
    code = f"""
import sys
from evenpipe.cli.main import main
for arguments in {[*commands, ["--version"], ["simulate", "--help"], ["simulate", *schedule], ["draw", *schedule]]}:
    main(arguments)
    heavy = {{"torch", "transformers", "datasets", "tokenizers", "numpy", "tensorboard", "tqdm", "ortools"}}
    if heavy & set(sys.modules):
        sys.exit(f"{{arguments}} imports {{heavy & set(sys.modules)}}")
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
