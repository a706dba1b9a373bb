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
    return tmp_path


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
    """What is launched, in place of launching it."""
    calls: list[tuple] = []

    def launch(function, *arguments, **options):
        calls.append((function, arguments, options))
        return [0]

    stand_in("processes.launcher", prepare_launch=lambda *modules: None, launch=launch)
    stand_in("train.trainer", train="train")
    return calls


def test_train_prepares_and_then_launches(started, capsys):
    assert main(["train", "config.toml", "training.steps=7", "pipeline.timeout_seconds=30"]) == 0
    config = load_config("config.toml", ["training.steps=7", "pipeline.timeout_seconds=30"])
    ((function, (launched, claims, callbacks), options),) = started
    assert callbacks == ()
    assert callable(options.pop("on_stop"))
    assert (function, launched, options) == ("train", config, {"processes": 2, "timeout_seconds": 30.0})
    assert [Path(claim.folder) for claim in claims] == [Path("run").resolve(), Path("run/checkpoints").resolve()]
    names = {path.name for path in Path("run").glob("[!.]*")}
    assert names == {"checkpoints", "config.json", "data", "data.json", "tokenizer"}
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[0] == "reading 1 file"


def test_train_exports_the_newest_checkpoint_unless_told_otherwise(started, exported, capsys):
    assert main(["train", "config.toml", "checkpoint.folder=saved", "output.export_folder=out"]) == 0
    assert exported == [(Path("saved"), Path("out"))]
    assert "the model is in out\n" in capsys.readouterr().err
    assert main(["train", "config.toml", "output.export=false"]) == 0
    assert (len(started), len(exported)) == (2, 1)


DATA = {
    # contents of the text file, words of the sentence
    b"": ["has no text"],
    b"x": ["0 training sequences", "one step needs 2"],
    b"abc\xe9": ["text.txt", "not UTF-8 at byte 3", "data.encoding_errors"],
}


def test_wrong_data_is_one_sentence_and_nothing_starts(started, capsys):
    for content, words in DATA.items():
        Path("text.txt").write_bytes(content)
        assert main(["train", "config.toml"]) == 2
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert sentence.startswith("evenpipe: ")
        for word in words:
            assert word in sentence
    assert started == []


def test_every_schedule_is_started(started, sample, capsys):
    names = sample(SCHEDULES, 4)
    for name in names:
        assert main(["train", "config.toml", f"pipeline.schedule={name}"]) == 0, capsys.readouterr().err
    assert len(started) == len(names)


def test_a_run_that_fails(started, monkeypatch, capsys):
    def fails(*arguments, **options):
        raise RunError("process 1 has died")

    monkeypatch.setattr(sys.modules["evenpipe.processes.launcher"], "launch", fails)
    assert main(["train", "config.toml"]) == 3
    assert capsys.readouterr().err.endswith("evenpipe: process 1 has died\n")


def test_text_is_written_after_training(started, exported, monkeypatch, capsys):
    class Generator:
        def __init__(self, folder, trust_remote_code):
            assert (folder, trust_remote_code) == (Path("run/model"), False)
            assert (len(started), len(exported)) == (1, 1), "the model is there only after training and export"

        def __call__(self, prompt, **options):
            return f"{prompt}... {options}"

    monkeypatch.setattr("evenpipe.train.generation.Generator", Generator)
    assert main(["train", "config.toml", "sample.prompts=import", "sample.new_tokens=9", "training.seed=4"]) == 0
    options = {"max_new_tokens": 9, "temperature": 0.7, "top_k": 40, "seed": 4}
    assert capsys.readouterr().out == f"\n--- 'import'\nimport... {options}\n"


class Watch:
    def __init__(self):
        self.calls = []

    def report_exception(self, error):
        self.calls.append(f"reported {error}")


@pytest.fixture
def torchrun(stand_in, monkeypatch, exported):
    """One process of two that torchrun started; the rank can be chosen. Gives (watch, marks, calls of train)."""
    watch, marks, trained = Watch(), set(), []

    def wait_for_mark(name, what, needed_by):
        watch.calls.append(f"awaited {what} for {needed_by}")
        if name not in marks:
            raise RunError("process 0 failed: the data is wrong")

    def become(rank):
        this = types.SimpleNamespace(rank=rank, world_size=2, watch=watch, mark=marks.add, wait_for_mark=wait_for_mark)
        ends = {"finish_worker": lambda: watch.calls.append("finished")}
        stand_in("processes.worker", initialise_worker=lambda timeout_seconds: this, **ends)
        stand_in("train.trainer", train=lambda config, callbacks: trained.append(config))
        monkeypatch.setenv("RANK", str(rank))
        return watch, marks, trained

    return become


def test_inside_torchrun_the_first_process_prepares_and_exports(torchrun, exported, capsys):
    watch, marks, trained = torchrun(0)
    assert main(["train", "config.toml", "pipeline.processes=4"]) == 2
    assert "pipeline.processes is 4, but must be 2" in capsys.readouterr().err
    assert main(["train", "config.toml", "data.files=nowhere.txt"]) == 2
    reported = watch.calls.copy()  # so that the others end with the same words
    assert reported[0].startswith("reported pipeline.processes") and "nowhere.txt" in reported[1]
    assert not marks and not trained
    watch.calls.clear()
    assert main(["train", "config.toml"]) == 0
    assert (trained, marks) == ([load_config("config.toml")], {start_module.SET_UP})
    assert watch.calls == ["awaited the data for training", "finished"]
    assert Path("run/data.json").is_file()
    assert exported == [(Path("run/checkpoints"), Path("run/model"))]


def test_inside_torchrun_the_others_wait_and_learn_of_a_failure(torchrun, exported, capsys):
    watch, marks, trained = torchrun(1)
    assert main(["train", "config.toml"]) == 3
    assert watch.calls[0] == "awaited the data for training"
    assert not trained and not Path("run").exists()
    assert "the data is wrong" in capsys.readouterr().err
    marks.add(start_module.SET_UP)
    watch.calls.clear()
    assert main(["train", "config.toml"]) == 0
    assert watch.calls == ["awaited the data for training", "finished"]
    assert (len(trained), exported) == (1, [])


def test_export_and_generate_call_what_does_the_work(exported, monkeypatch, capsys):
    assert main(["export", "run", "-o", "out"]) == 0
    assert exported == [(Path("run"), Path("out"))]
    assert capsys.readouterr().out == "wrote out\n"

    generated = []

    def generator(folder):
        return lambda prompt, **options: generated.append((folder, prompt, options)) or f"{prompt} more"

    monkeypatch.setattr("evenpipe.train.generation.Generator", generator)
    arguments = ["--prompt", "text", "--new-tokens", "5", "--temperature", "0", "--top-k", "3", "--seed", "8"]
    assert main(["generate", "out", *arguments]) == 0
    assert generated == [("out", "text", {"max_new_tokens": 5, "temperature": 0.0, "top_k": 3, "seed": 8})]
    assert capsys.readouterr().out == "text more\n"
