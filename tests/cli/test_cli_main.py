"""The command line: help, exit codes, what is imported when; and what train, export and generate call."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from small_run import TOML

from evenpipe import __version__
from evenpipe.cli import main as cli
from evenpipe.cli.main import main
from evenpipe.errors import InputError, RunError
from evenpipe.schedule import SCHEDULES
from evenpipe.train import start as start_module
from evenpipe.train.config_file import load_config
from evenpipe.train.config_help import configuration_help


@pytest.fixture
def command(monkeypatch):
    """Function that puts a function in the place of `evenpipe generate`, and runs it; gives the exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def run(function, *arguments):
        module = types.ModuleType("evenpipe.cli.generate")
        module.run = function
        monkeypatch.setitem(sys.modules, "evenpipe.cli.generate", module)
        return cli.main(["generate", *arguments])

    yield run
    signal.signal(signal.SIGTERM, before)


def raising(error):
    def run():
        raise error

    return run


def counted(*, number: int) -> int:
    """Count.

    --number N  the exit code
    """
    return number


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        signal.pause()


ENDINGS = [
    # what the command does, exit code, what standard error shows
    (lambda: 0, 0, ""),
    (lambda: 1, 1, ""),
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
    assert command(counted, "--number", "1") == 1


def test_a_terminal_without_a_character_shows_a_question_mark():
    arguments = ["draw", "--schedule", "1f1b", "--devices", "1", "--microbatches", "1", "--unit-seconds", "1e-6"]
    command = [sys.executable, "-m", "evenpipe.cli.main", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "step 3.8 ?s" in result.stdout


def test_version_and_help(capsys):
    for module in ("evenpipe", "evenpipe.cli.main"):
        command = [sys.executable, "-m", module, "--version"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert output == f"evenpipe {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS) and "2 the input is wrong" in text
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in cli.COMMANDS)
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"Usage: evenpipe {name}" in text and cli.COMMANDS[name] in " ".join(text.split())
        assert name != "train" or textwrap.indent(configuration_help(), "  ") in text


def test_a_group_has_the_same_commands(capsys):
    assert cli.main(["schedule"]) == 2
    listed = capsys.readouterr().err
    assert all(f"  {name} " in listed for name in cli.GROUPS["schedule"]) and "train" not in listed
    for name in cli.GROUPS["schedule"]:
        helps = []
        for group in ([], ["schedule"]):
            assert cli.main([*group, name, "--help"]) == 0
            helps.append(capsys.readouterr().out.replace("evenpipe schedule ", "evenpipe "))
        assert helps[0] == helps[1]
    size = ["--devices", "2", "--microbatches", "2"]
    assert cli.main(["schedule", "simulate", "--schedule", "1f1b", *size]) == 0
    assert "1f1b, vocab-2: 2 devices" in capsys.readouterr().out


def test_nothing_heavy_is_imported_before_it_is_needed():
    schedule = ["--schedule", "1f1b", "--devices", "2", "--microbatches", "2"]
    commands = [["--help"], ["--version"], ["train", "--help"], ["train", "missing.toml"], ["search", "--help"]]
    commands += [["check", "no.csv"], ["simulate", "--help"], ["simulate", *schedule], ["draw", *schedule]]
    code = f"""
import sys
from evenpipe.cli.main import main
for arguments in {commands}:
    main(arguments)
    heavy = {{"torch", "transformers", "datasets", "tokenizers", "numpy", "tensorboard", "tqdm", "ortools", "rich"}}
    if arguments in (["--help"], ["--version"]):
        heavy |= {{"pydantic", "evenpipe.schedule"}}
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
module.run = lambda: print("x" * 1_000_000, flush=True)
sys.modules["evenpipe.cli.generate"] = module
sys.exit(main(["generate"]))
"""
    command = ["bash", "-c", '"$0" -c "$1" | true; exit ${PIPESTATUS[0]}', sys.executable, code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (141, "")


# ---- what train, export and generate call


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a configuration and a text, and nobody who could start processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("config.toml").write_text(TOML)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 100)


@pytest.fixture
def stand_in(monkeypatch):
    """Function that puts names in the place of a module of evenpipe."""

    def replace(module, **names):
        stand = types.ModuleType(f"evenpipe.{module}")
        vars(stand).update(names)
        monkeypatch.setitem(sys.modules, stand.__name__, stand)

    return replace


@pytest.fixture
def exported(stand_in):
    """What is exported, (from, to), in place of exporting it."""
    calls: list[tuple[Path, Path]] = []
    stand_in("train.export", export_checkpoint=lambda source, target, **_: calls.append((source, target)) or target)
    return calls


@pytest.fixture
def started(stand_in, exported):
    """What is launched, in place of launching it; everything is prepared by then, and nothing exported."""
    calls: list[tuple] = []

    def launch(function, *arguments, **options):
        names = {path.name for path in Path("run").glob("[!.]*")}
        assert names >= {"config.json", "data", "data.json", "tokenizer"} and not exported
        calls.append((function, arguments, options))
        return [0]

    stand_in("processes.launcher", prepare_launch=lambda *modules: None, launch=launch)
    stand_in("train.trainer", train="train")
    return calls


@pytest.fixture
def generated(stand_in):
    """Texts that are generated, (folder, prompt, options), in place of generating them."""
    calls: list[tuple] = []

    def generator(folder, trust_remote_code=False):
        return lambda prompt, **options: calls.append((str(folder), prompt, options)) or f"{prompt} more"

    stand_in("train.generation", Generator=generator)
    return calls


def test_train_prepares_launches_exports_and_writes(started, exported, generated, capsys):
    overrides = ["training.steps=7", "pipeline.timeout_seconds=30", "checkpoint.folder=saved", "training.seed=4"]
    overrides += ["output.export_folder=out", "sample.prompts=import", "sample.new_tokens=9"]
    assert main(["train", "config.toml", *overrides]) == 0
    ((function, (launched, claims, callbacks), options),) = started
    assert callbacks == ()
    assert callable(options.pop("on_stop"))
    assert (function, launched) == ("train", load_config("config.toml", overrides))
    assert options == {"processes": 2, "timeout_seconds": 30.0}
    assert [Path(claim.folder) for claim in claims] == [Path("run").resolve(), Path("saved").resolve()]
    assert exported == [(Path("saved"), Path("out"))]
    assert generated == [("out", "import", {"max_new_tokens": 9, "temperature": 0.7, "top_k": 40, "seed": 4})]
    output = capsys.readouterr()
    assert output.out == "\n--- 'import'\nimport more\n"
    assert output.err.startswith("reading 1 file\n") and output.err.endswith("the model is in out\n")


def test_every_schedule_is_started_and_nothing_exported_if_told(started, exported, sample, capsys):
    names = sample(SCHEDULES, 4)
    for name in names:
        arguments = ["train", "config.toml", f"pipeline.schedule={name}", "output.export=false"]
        assert main(arguments) == 0, capsys.readouterr().err
    assert (len(started), exported) == (len(names), [])


def test_export_and_generate_call_what_does_the_work(exported, generated, capsys):
    assert main(["export", "run", "-o", "out"]) == 0
    assert exported == [(Path("run"), Path("out"))]
    options = ["--new-tokens", "5", "--temperature", "0", "--top-k", "3", "--seed", "8"]
    assert main(["generate", "out", "--prompt", "text", *options]) == 0
    assert generated == [("out", "text", {"max_new_tokens": 5, "temperature": 0.0, "top_k": 3, "seed": 8})]
    assert capsys.readouterr().out == "wrote out\ntext more\n"


def test_inside_torchrun_the_first_process_prepares_and_exports(stand_in, monkeypatch, exported, capsys):
    """The others wait until it is done: tests/multiprocess/test_training.py."""
    calls, trained = [], []
    watch = types.SimpleNamespace(report_exception=lambda error: calls.append(f"reported {error}"))
    marking = {"mark": calls.append, "wait_for_mark": lambda name, *what: calls.append(f"awaited {name}")}
    worker = types.SimpleNamespace(rank=0, world_size=2, watch=watch, **marking)
    ends = {"finish_worker": lambda: calls.append("finished")}
    stand_in("processes.worker", initialise_worker=lambda timeout_seconds: worker, **ends)
    stand_in("train.trainer", train=lambda config, callbacks: trained.append(config))
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "config.toml", "pipeline.processes=4"]) == 2
    assert "pipeline.processes is 4; it must be 2" in capsys.readouterr().err
    assert main(["train", "config.toml", "data.files=nowhere.txt"]) == 2
    # reported, so that the others end with the same words
    assert calls[0].startswith("reported pipeline.processes") and "nowhere.txt" in calls[1] and not trained
    assert main(["train", "config.toml"]) == 0
    assert trained == [load_config("config.toml")]
    assert calls[2:] == [start_module.SET_UP, f"awaited {start_module.SET_UP}", "finished"]
    assert exported == [(Path("run/checkpoints"), Path("run/model"))]
