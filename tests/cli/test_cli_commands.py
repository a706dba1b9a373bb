"""What each command calls: what train prepares and launches, alone and inside torchrun, what it exports and writes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from small_run import TOML

from evenpipe.cli.main import main
from evenpipe.errors import RunError
from evenpipe.schedule import SCHEDULES
from evenpipe.train import start as start_module
from evenpipe.train.config_file import load_config


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


@pytest.fixture
def torchrun(stand_in, monkeypatch):
    """Function that becomes a process of two that torchrun started. Gives (calls of the watch, marks, runs)."""
    calls, marks, trained = [], set(), []

    def wait_for_mark(name, what, needed_by):
        calls.append(f"awaited {what} for {needed_by}")
        if name not in marks:
            raise RunError("process 0 failed: the data is wrong")

    def become(rank):
        watch = types.SimpleNamespace(report_exception=lambda error: calls.append(f"reported {error}"))
        this = types.SimpleNamespace(rank=rank, world_size=2, watch=watch, mark=marks.add, wait_for_mark=wait_for_mark)
        ends = {"finish_worker": lambda: calls.append("finished")}
        stand_in("processes.worker", initialise_worker=lambda timeout_seconds: this, **ends)
        stand_in("train.trainer", train=lambda config, callbacks: trained.append(config))
        monkeypatch.setenv("RANK", str(rank))
        return calls, marks, trained

    return become


def test_inside_torchrun_the_first_process_prepares_and_exports(torchrun, exported, capsys):
    calls, marks, trained = torchrun(0)
    assert main(["train", "config.toml", "pipeline.processes=4"]) == 2
    assert "pipeline.processes is 4, but must be 2" in capsys.readouterr().err
    assert main(["train", "config.toml", "data.files=nowhere.txt"]) == 2
    # reported, so that the others end with the same words
    assert calls[0].startswith("reported pipeline.processes") and "nowhere.txt" in calls[1]
    assert not marks and not trained
    assert main(["train", "config.toml"]) == 0
    assert (trained, marks) == ([load_config("config.toml")], {start_module.SET_UP})
    assert calls[2:] == ["awaited the data for training", "finished"]
    assert exported == [(Path("run/checkpoints"), Path("run/model"))]


def test_inside_torchrun_the_others_wait_and_learn_of_a_failure(torchrun, exported, capsys):
    calls, marks, trained = torchrun(1)
    assert main(["train", "config.toml"]) == 3
    assert not trained and not Path("run").exists()
    assert "the data is wrong" in capsys.readouterr().err
    marks.add(start_module.SET_UP)
    assert main(["train", "config.toml"]) == 0
    assert [call for call in calls if "reported" not in call] == [*["awaited the data for training"] * 2, "finished"]
    assert (len(trained), exported) == (1, [])
