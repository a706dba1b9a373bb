"""Callbacks: how they are found, what is no callback, and what their answers and faults become."""

from __future__ import annotations

import sys

import pytest
from refusals import refusal

from evenpipe import Callback, TrainingState
from evenpipe.errors import InputError, RunError
from evenpipe.train.callbacks import call, find_callbacks, make_callbacks

MODULE = """
import evenpipe

class Mine(evenpipe.Callback):
    pass

ready = Mine()
number = 3

class NeedsMore(evenpipe.Callback):
    def __init__(self, what):
        self.what = what
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that the command is started in, with modules of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "callbacks_found_here.py").write_text(MODULE)
    (tmp_path / "broken_callbacks.py").write_text("def helper():\n    return 1 / 0\n\nhelper()\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def state():
    values = {"step": 3, "steps": 9, "epoch": 0.5, "learning_rate": 1e-3, "gradient_norm": 1.0, "is_first": True}
    others = {"result": None, "validation_loss": None, "pipeline": None, "optimizer": None}
    return TrainingState(**values, **others)


NOT_FOUND = [
    ("nothing_at_all:Mine", ["training.callbacks[0]", '"nothing_at_all:Mine"', "no module nothing_at_all"]),
    ("callbacks_found_here.deeper:Mine", ["no module callbacks_found_here.deeper"]),
    ("callbacks_found_here:Mina", ["callbacks_found_here has no Mina", 'did you mean "Mine"']),
    ("callbacks_found_here:number", ["must name a class derived from evenpipe.Callback"]),
    ("broken_callbacks:Mine", ["cannot be imported: ZeroDivisionError", "in helper", "return 1 / 0"]),
]


def test_what_is_no_callback_is_a_sentence(folder):
    for name, words in NOT_FOUND:
        sentence = refusal(find_callbacks, [name])
        assert all(word in sentence for word in words) and "importlib" not in sentence, sentence


def test_what_cannot_be_made_is_a_sentence(folder):
    names = ["Mine", "ready", "NeedsMore"]
    mine, ready, needs_more = find_callbacks([f"callbacks_found_here:{name}" for name in names])
    assert make_callbacks([mine, ready]) and not make_callbacks([])
    with pytest.raises(InputError, match="callback callbacks_found_here:NeedsMore cannot be made without arguments"):
        make_callbacks([needs_more])
    with pytest.raises(InputError, match=r"callbacks has int; each must be an instance of evenpipe\.Callback"):
        make_callbacks([3])


class Answers(Callback):
    def __init__(self, answer):
        self.answer = answer
        self.seen = []

    def on_step_end(self, state):
        self.seen.append(state.step)
        return self.answer

    def on_save(self, state, path):
        return self.answer


def test_one_that_wants_to_stop_is_enough_and_all_are_called():
    for answers, stop in (((None, None), False), ((None, "stop"), True), (("stop", None), True)):
        callbacks = [Answers(answer) for answer in answers]
        assert call(make_callbacks(callbacks), "on_step_end", state()) is stop
        assert [callback.seen for callback in callbacks] == [[3], [3]]


def test_any_other_answer_is_a_sentence():
    with pytest.raises(RunError, match=r'Answers returned true from on_step_end; expected None or "stop"$'):
        call(make_callbacks([Answers(True)]), "on_step_end", state())
    with pytest.raises(RunError, match=r"Answers returned true from on_save; expected None$"):
        call(make_callbacks([Answers(True)]), "on_save", state(), "somewhere")
