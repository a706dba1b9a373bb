"""What each command calls, and a table of wrong input: one sentence on standard error, exit code 2, nothing started."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from small_run import TOML

from evenpipe.cli.main import main
from evenpipe.errors import RunError
from evenpipe.schedule import SCHEDULES, generate
from evenpipe.train import start as start_module
from evenpipe.train.config_file import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a configuration and a text, and nobody who could start processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("config.toml").write_text(TOML)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 100)
    return tmp_path


@pytest.fixture
def exported(monkeypatch):
    """What is exported, (from, to), in place of exporting it."""
    calls: list[tuple[Path, Path]] = []

    def export_checkpoint(source, target, **options):
        calls.append((source, target))
        return target

    export = types.ModuleType("evenpipe.train.export")
    export.export_checkpoint = export_checkpoint
    monkeypatch.setitem(sys.modules, "evenpipe.train.export", export)
    return calls


@pytest.fixture
def started(monkeypatch, exported):
    """What is launched, in place of launching it."""
    calls: list[tuple] = []
    launcher = types.ModuleType("evenpipe.processes.launcher")
    launcher.prepare_launch = lambda *modules: None
    launcher.launch = lambda function, *arguments, **options: [calls.append((function, arguments, options)) or 0]
    trainer = types.ModuleType("evenpipe.train.trainer")
    trainer.train = "train"
    monkeypatch.setitem(sys.modules, "evenpipe.processes.launcher", launcher)
    monkeypatch.setitem(sys.modules, "evenpipe.train.trainer", trainer)
    return calls


def test_train_prepares_and_then_launches(started, capsys):
    assert main(["train", "config.toml", "training.steps=7", "pipeline.timeout_seconds=30"]) == 0
    config = load_config("config.toml", ["training.steps=7", "pipeline.timeout_seconds=30"])
    ((function, (launched, claims, callbacks), options),) = started
    assert callbacks == ()
    assert callable(options.pop("on_stop"))
    assert (function, launched, options) == ("train", config, {"processes": 2, "timeout_seconds": 30.0})
    assert [Path(claim.folder) for claim in claims] == [Path("run").resolve(), Path("run/checkpoints").resolve()]
    assert sorted(path.name for path in Path("run").glob("[!.]*")) == [
        "checkpoints",
        "config.json",
        "data",
        "data.json",
        "tokenizer",
    ]
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[0] == "reading 1 file"


def test_train_exports_the_newest_checkpoint_unless_told_otherwise(started, exported, capsys):
    assert main(["train", "config.toml", "checkpoint.folder=saved", "output.export_folder=out"]) == 0
    assert exported == [(Path("saved"), Path("out"))]
    assert "the model is in out\n" in capsys.readouterr().err
    assert main(["train", "config.toml", "output.export=false"]) == 0
    assert (len(started), len(exported)) == (2, 1)


WRONG = [
    # overrides, words of the sentence
    (["training.step=3"], ["training.step ", 'did you mean "steps"']),
    (["optimiser.learning_rate=1"], ["[optimiser]", 'did you mean "optimizer"']),
    (["pipeline.vocabulary=vocab2"], ["pipeline.vocabulary", 'did you mean "vocab-2"']),
    (["pipeline.schedule=1f1"], ["pipeline.schedule", 'did you mean "1f1b"']),
    (["pipeline.processes=5"], ["pipeline.processes is 5", "at most 4"]),
    (["pipeline.processes=-1"], ["pipeline.processes is -1", "at least 1"]),
    (["data.sequence_length=65"], ["data.sequence_length is 65", "at most 64"]),
    (["data.files=nowhere.txt"], ["data.files", "nowhere.txt", "no such file"]),
    (["data.files=empty.txt"], ["has no text"]),
    (["data.files=short.txt"], ["0 training sequences", "one step needs 2"]),
    (["data.files=latin.txt"], ["latin.txt", "not UTF-8 at byte 3", "data.encoding_errors"]),
    (["data.files=broken.jsonl"], ["broken.jsonl", "line 2", "not JSON"]),
    (["model.config.hiden_size=8"], ["model.config.hiden_size", 'did you mean "hidden_size"']),
    (["model.config.vocab_size=100"], ["model.config.vocab_size is 100", "at least"]),
    (["pipeline.layers_per_stage=[1,2]"], ["pipeline.layers_per_stage is [1, 2]", "4 layers"]),
    (["pipeline.schedule=v-budget", "pipeline.memory_limit=1"], ["pipeline.memory_limit is 1", "needs 4 stage"]),
    (["pipeline.schedule=interleaved", "pipeline.stages_per_device=3"], ["6 stages on 2 devices", "at most 4"]),
    (["steps=3"], ["section.key=value"]),
]


@pytest.mark.parametrize(("overrides", "words"), WRONG, ids=lambda value: str(value[0]))
def test_wrong_input_is_one_sentence_and_nothing_starts(started, capsys, overrides, words):
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("x")
    Path("latin.txt").write_bytes(b"abc\xe9")
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    assert main(["train", "config.toml", *overrides]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("evenpipe: ")
    for word in words:
        assert word in sentence
    assert started == []
    assert "Traceback" not in sentence


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_started(name, started, capsys):
    code = main(["train", "config.toml", f"pipeline.schedule={name}"])
    assert (code, len(started)) == (0, 1), capsys.readouterr().err


ORDERS = [
    # rows of a CSV file, words of the sentence
    ("0F0,0F1,0O0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1\n", ["0D0 is missing, so the copied memory"]),
    ("0F0,0B0\n1F0,1B0\n", ["pipeline.microbatches is 2, but must be 1", "order.csv"]),
    ("0F0,0F1\n1F0,1F1\n", ["only evaluates"]),
    ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ["1 fault"]),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1Q1\n", ["row 2, column 4", "'1Q1' is not a pass"]),
    (generate("looped-bfs", 2, 2, stages_per_device=3).to_csv(), ["has 6 stages", "at most 4, the layers"]),
]


@pytest.mark.parametrize(("rows", "words"), ORDERS, ids=lambda value: str(value)[:40])
def test_an_order_from_a_file_is_refused_before_anything_starts(rows, words, started, capsys):
    Path("order.csv").write_text(rows)
    assert main(["train", "config.toml", "pipeline.schedule=order.csv"]) == 2
    error = capsys.readouterr().err
    assert "evenpipe: " in error
    for word in words:
        assert word in error
    assert started == []
    assert not Path("run").exists()


def test_a_missing_configuration(capsys):
    assert main(["train", "nowhere.toml"]) == 2
    assert (
        capsys.readouterr().err
        == 'evenpipe: the configuration "nowhere.toml" cannot be read: No such file or directory\n'
    )


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
def torchrun(monkeypatch, exported):
    """One process of two that torchrun started; the rank can be chosen. Gives (watch, marks, calls of train)."""
    watch, marks, trained = Watch(), set(), []

    def wait_for_mark(name, what, needed_by):
        watch.calls.append(f"awaited {what} for {needed_by}")
        if name not in marks:
            raise RunError("process 0 failed: the data is wrong")

    def become(rank):
        this = types.SimpleNamespace(rank=rank, world_size=2, watch=watch, mark=marks.add, wait_for_mark=wait_for_mark)
        worker = types.ModuleType("evenpipe.processes.worker")
        worker.initialise_worker = lambda timeout_seconds: this
        worker.finish_worker = lambda: watch.calls.append("finished")
        trainer = types.ModuleType("evenpipe.train.trainer")
        trainer.train = lambda config, callbacks: trained.append(config)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setitem(sys.modules, "evenpipe.processes.worker", worker)
        monkeypatch.setitem(sys.modules, "evenpipe.train.trainer", trainer)
        return watch, marks, trained

    return become


def test_inside_torchrun_the_first_process_prepares_and_exports(torchrun, exported):
    watch, marks, trained = torchrun(0)
    assert main(["train", "config.toml"]) == 0
    assert trained == [load_config("config.toml")]
    assert marks == {start_module.SET_UP}
    assert watch.calls == ["awaited the data for training", "finished"]
    assert Path("run/data.json").is_file()
    assert exported == [(Path("run/checkpoints"), Path("run/model"))]


def test_inside_torchrun_the_others_wait_and_learn_of_a_failure(torchrun, exported, capsys):
    watch, marks, trained = torchrun(1)
    assert main(["train", "config.toml"]) == 3
    assert watch.calls[0] == "awaited the data for training"
    assert trained == []
    assert not Path("run").exists()
    assert "the data is wrong" in capsys.readouterr().err
    marks.add(start_module.SET_UP)
    watch.calls.clear()
    assert main(["train", "config.toml"]) == 0
    assert watch.calls == ["awaited the data for training", "finished"]
    assert (len(trained), exported) == (1, [])


def test_inside_torchrun_wrong_input_reaches_the_others(torchrun, capsys):
    watch, marks, trained = torchrun(0)
    assert main(["train", "config.toml", "pipeline.processes=4"]) == 2
    assert "pipeline.processes is 4, but must be 2" in capsys.readouterr().err
    assert watch.calls[0].startswith("reported pipeline.processes")
    assert main(["train", "config.toml", "data.files=nowhere.txt"]) == 2
    assert "nowhere.txt" in watch.calls[1]
    assert not marks
    assert not trained


def test_export_and_generate_call_what_does_the_work(exported, monkeypatch, capsys):
    assert main(["export", "run", "-o", "out"]) == 0
    assert exported == [(Path("run"), Path("out"))]
    assert capsys.readouterr().out == "wrote out\n"

    generated = []

    def generator(folder):
        def generate(prompt, **options):
            generated.append((folder, prompt, options))
            return prompt + " more"

        return generate

    monkeypatch.setattr("evenpipe.train.generation.Generator", generator)
    arguments = ["--prompt", "text", "--new-tokens", "5", "--temperature", "0", "--top-k", "3", "--seed", "8"]
    assert main(["generate", "out", *arguments]) == 0
    assert generated == [("out", "text", {"max_new_tokens": 5, "temperature": 0.0, "top_k": 3, "seed": 8})]
    assert capsys.readouterr().out == "text more\n"


def test_generate_without_a_model_is_wrong_input(capsys):
    assert main(["generate", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith('evenpipe: "nowhere" is not a model folder')


def test_the_quickstart_is_accepted():
    from evenpipe.train.model_source import pipeline_model

    config = load_config(ROOT / "examples" / "quickstart.toml")
    model = pipeline_model(config, config.tokenizer.vocabulary_size, 0)
    assert (model.vocab_size, model.num_hidden_layers, config.pipeline.processes) == (8192, 8, 4)
    assert config.pipeline.vocabulary == "balanced"
    assert config.sample.prompts
    assert config.run_folder == Path("runs/quickstart")
