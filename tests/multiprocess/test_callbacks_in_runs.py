"""Callbacks in runs of the trainer: where and when they are called, that they change no bit, and how they stop one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import curve, prepared, report_of, start, steps_logged, train, write_config

from evenpipe.errors import RunError

CALLBACKS = '''
import json
import os
from pathlib import Path

import torch

import evenpipe


class Recorder(evenpipe.Callback):
    """Writes down its calls, and does what a careless one would."""

    def __init__(self):
        self.calls = []

    def note(self, what, state, **more):
        self.calls.append({
            "what": what, "step": state.step, "steps": state.steps, "epoch": state.epoch, "loss": state.loss,
            "learning_rate": state.learning_rate, "gradient_norm": state.gradient_norm,
            "validation_loss": state.validation_loss, "is_first": state.is_first, **more,
        })

    def on_step_end(self, state):
        assert all(parameter.grad is None for parameter in state.pipeline.parameters())
        torch.manual_seed(state.step)
        torch.rand(3)
        held = sum(parameter.numel() for group in state.optimizer.param_groups for parameter in group["params"])
        everywhere = state.pipeline.gather_numbers([held])
        evaluated = state.pipeline.evaluate(torch.arange(6).view(1, 6)).loss
        self.note("step", state, held=everywhere, evaluated=evaluated)

    def on_evaluate(self, state):
        self.note("evaluate", state)

    def on_save(self, state, path):
        self.note("save", state, path=str(path), there=(path / "manifest.json").exists())

    def on_end(self, state):
        self.note("end", state)
        rank = os.environ.get("RANK") or str(torch.distributed.get_rank())
        Path(f"calls-{rank}.json").write_text(json.dumps(self.calls))


class StopsAfterFive(evenpipe.Callback):
    """Asked for by the second process alone."""

    def on_step_end(self, state):
        if state.step == 5 and not state.is_first:
            return "stop"


class StopsWhenEvaluated(evenpipe.Callback):
    def on_evaluate(self, state):
        if state.step >= 4:
            return "stop"


class Fails(evenpipe.Callback):
    def on_save(self, state, path):
        raise LookupError(f"nothing in {path.name}")
'''

TRACKIO = """
import json

class init:
    def __init__(self, **options):
        self.file = open("tracked.jsonl", "a")
        self.note(opened=options["name"])

    def note(self, **what):
        print(json.dumps(what), file=self.file, flush=True)

    def log(self, figures, step):
        self.note(step=step, loss=figures.get("loss"))

    def finish(self):
        self.note(finished=True)
"""


def changes_for(folder: Path, *callbacks: str, **training: Any) -> dict[str, Any]:
    """Write the module of the callbacks and a tracker into a folder; return what a configuration needs for them."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(CALLBACKS)
    (folder / "trackio.py").write_text(TRACKIO)
    names = [f"mine:{name}" for name in callbacks]
    return {"training.callbacks": names, **{f"training.{name}": value for name, value in training.items()}}


def train_with(folder: Path, *callbacks: str, **training: Any) -> Path:
    """Train a run with callbacks; return its configuration."""
    path = prepared(folder, changes_for(folder, *callbacks, **training))
    train(path)
    return path


def test_calls_on_every_process_and_no_bit_is_changed(tmp_path: Path) -> None:
    for name, callbacks in (("without", ()), ("with", ("Recorder",))):
        train_with(tmp_path / name, *callbacks, evaluate_every_steps=6)
    assert curve(tmp_path / "with") == curve(tmp_path / "without")

    first, second = (json.loads((tmp_path / "with" / f"calls-{rank}.json").read_text()) for rank in range(2))
    steps = [("step", number) for number in range(1, 13)]
    expected = [*steps[:4], ("save", 4), *steps[4:6], ("evaluate", 6), *steps[6:8], ("save", 8), *steps[8:]]
    expected += [("evaluate", 12), ("save", 12), ("end", 12)]
    assert [(call["what"], call["step"]) for call in first] == expected
    assert {call["is_first"] for call in first} == {True}
    assert [{**call, "is_first": True} for call in second] == first
    lines = {line["step"]: line for line in steps_logged(tmp_path / "with")}
    names = ("loss", "learning_rate", "gradient_norm", "epoch")
    for call in first:
        assert [call[name] for name in names] == [lines[call["step"]][name] for name in names]
        assert call["steps"] == 12
        assert (call["validation_loss"] is None) == (call["step"] < 6 or (call["step"], call["what"]) == (6, "step"))
    assert all(call["there"] and call["path"].endswith(f"step-{call['step']:08d}") for call in first if "path" in call)


def test_a_callback_may_stop_a_run_which_then_ends_as_at_its_last_step(tmp_path: Path) -> None:
    path = train_with(tmp_path, "StopsAfterFive", "Recorder")
    assert [line[0] for line in curve(tmp_path)] == [1, 2, 3, 4, 5, 5]
    assert (tmp_path / "run" / "checkpoints" / "step-00000005" / "manifest.json").exists()
    assert report_of(tmp_path)["steps"] == 5
    calls = json.loads((tmp_path / "calls-0.json").read_text())
    assert [(call["what"], call["step"]) for call in calls[-3:]] == [("evaluate", 5), ("save", 5), ("end", 5)]
    assert calls[-1]["steps"] == 5
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(path)  # it does not go on
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (end,) = json.loads((tmp_path / "calls-0.json").read_text())
    assert (end["what"], end["step"], end["steps"]) == ("end", 5, 5)
    train(path, "training.steps=7")  # it does when told another number
    assert [line[0] for line in curve(tmp_path)] == [1, 2, 3, 4, 5, 5, 6, 7, 7]


def test_a_callback_may_stop_a_run_when_it_is_evaluated(tmp_path: Path) -> None:
    train_with(tmp_path, "StopsWhenEvaluated", evaluate_every_steps=3)
    assert [line[0] for line in curve(tmp_path)] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert report_of(tmp_path)["steps"] == 6


def test_a_failing_callback_is_named_once_and_loses_nothing(tmp_path: Path) -> None:
    """With a tracker of the first process; the checkpoint before is whole, and without the callback the run goes on."""
    path = prepared(tmp_path, {**changes_for(tmp_path, "Fails"), "output.trackers": "trackio"})
    failure = start(path).exception
    assert isinstance(failure, RunError)
    sentence, heading, place, *_, last = str(failure).splitlines()
    assert sentence == "callback mine:Fails failed in on_save at step 4: LookupError: nothing in step-00000004"
    assert heading.startswith("Traceback") and place.startswith(f'  File "{tmp_path / "mine.py"}", line ')
    assert last == "LookupError: nothing in step-00000004"
    train(path, "training.callbacks=[]")
    tracked = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert [line["step"] for line in tracked if line.get("loss")] == list(range(1, 13))
    assert len({line["opened"] for line in tracked if "opened" in line}) == 1


PROGRAM = """
import sys
from pathlib import Path

import evenpipe


class Counts(evenpipe.Callback):
    def __init__(self, name):
        self.name, self.count = name, 0

    def on_step_end(self, state):
        self.count += 1

    def on_end(self, state):
        if state.is_first:
            Path(self.name).write_text(f"{self.count} {state.step}")


if __name__ == "__main__":
    evenpipe.run_training(sys.argv[1], callbacks=[Counts("counted")])
"""


@pytest.mark.slow
def test_a_program_trains_with_callbacks_of_its_own(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "counted").read_text() == "12 12"
