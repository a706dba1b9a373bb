"""metrics.jsonl across interruptions, TensorBoard files, progress on and off a terminal, and the running mean."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from dataclasses import asdict

import pytest
from logged_steps import step

from evenpipe.errors import InputError
from evenpipe.train.metrics import (
    Metrics,
    MetricsFile,
    Progress,
    RunningMean,
    TensorBoard,
    kept_lines,
    progress_text,
    time_text,
)


def run(path, steps, resume_step=0, evaluate_every=4):
    """Log steps behind `resume_step`, each fourth with an evaluation."""
    file = MetricsFile(path, resume_step)
    for number in range(resume_step + 1, steps + 1):
        file.write({"step": number, "loss": 1 / number})
        if number % evaluate_every == 0:
            file.write({"step": number, "validation_loss": 2 / number})
    return file


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole.jsonl", 12).close()
    run(tmp_path / "cut.jsonl", 10)  # killed: neither synced nor closed
    with (tmp_path / "cut.jsonl").open("ab") as file:
        file.write(b'{"step": 11, "lo')
    run(tmp_path / "cut.jsonl", 12, resume_step=4).close()
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_cut_off_anywhere_is_repaired(tmp_path):
    run(tmp_path / "whole.jsonl", 5).close()
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for cut_at in range(0, 60, 7):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut_at])
        run(tmp_path / "cut.jsonl", 5, resume_step=whole[:cut_at].count(b"\n")).close()
        assert (tmp_path / "cut.jsonl").read_bytes() == whole
    run(tmp_path / "cut.jsonl", 1).close()
    assert (tmp_path / "cut.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n', "a run from the beginning has its own"


LINES = [
    # text, resumed step, kept
    ("", 5, ""),
    ('{"step": 1}\n{"step": 2}\n', 1, '{"step": 1}\n'),
    ('{"step": 2}', 2, ""),
    ('{"step": 1}\nnoise\n[]\n{"loss": 1}\n{"step": 2}\n', 2, '{"step": 1}\n{"step": 2}\n'),
    ('{"step": 2, "validation_loss": 1}\n{"step": 3}\n', 2, '{"step": 2, "validation_loss": 1}\n'),
]


def test_which_lines_are_kept():
    for text, resume_step, kept in LINES:
        assert kept_lines(text, resume_step) == kept


def test_lines_are_there_at_once_and_are_json(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": 1, "loss": math.inf, "busy": [0.5, math.nan], "learning_rate": 0.1})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "loss": None, "busy": [0.5, None], "learning_rate": 0.1}


def test_the_running_mean_is_plain_at_first_and_exponential_later():
    mean = RunningMean()
    assert [mean.add(loss) for loss in (4.0, 2.0, 6.0)] == [4.0, 3.0, 4.0]
    for _ in range(2000):
        mean.add(1.0)
    assert mean.mean == pytest.approx(1.0)
    assert mean.add(51.0) == pytest.approx(2.0)


def test_the_running_mean_goes_on_to_the_last_bit():
    losses = [random.Random(0).gauss(5, 1) for _ in range(120)]
    whole, first = RunningMean(), RunningMean()
    expected = [whole.add(loss) for loss in losses]
    for loss in losses[:77]:
        first.add(loss)
    resumed = RunningMean(**json.loads(json.dumps(asdict(first))))
    assert [resumed.add(loss) for loss in losses[77:]] == expected[77:]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_hides_what_was_logged_behind_the_resumed_step(tmp_path):
    for resume_step, loss in ((0, 1.0), (2, 3.0)):
        board = TensorBoard(tmp_path, resume_step)
        for number in range(resume_step + 1, 5):
            board.write({"step": number, "loss": loss, "busy": [0.25, 0.5]})
        board.close()
    shown = scalars(tmp_path)
    assert shown["loss"] == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]
    assert shown["busy/device 1"] == [(number, 0.5) for number in range(1, 5)]
    assert "step" not in shown


def test_tensorboard_that_is_not_installed_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"output\.tensorboard is true.*pip install tensorboard"):
        TensorBoard(tmp_path, 0)


def test_progress_in_words():
    text = progress_text(step(2, loss=4.9, running_mean_loss=5.1234, tokens_per_second=12345.6, busy=(0.934, 0.5, 1.0)))
    beginning = "epoch 0.50  loss 4.900  running mean 5.123  rate 1.0e-03  norm 0.5  12,346 tokens/s"
    assert text == f"{beginning}  busy 93 50 100 %"
    many = step(2, busy=tuple(number / 100 for number in range(31, 95)))
    assert progress_text(many).endswith("1,234 tokens/s  busy 31 to 94 %")


TIMES = [
    # seconds, words
    (0.2, "1 s"),
    (59.0, "59 s"),
    (60.0, "1 min"),
    (3540.5, "1 h 00 min"),
    (3 * 3600 + 250, "3 h 05 min"),
    (55 * 3600, "2 d 7 h"),
]


def test_times_in_words():
    for seconds, words in TIMES:
        assert time_text(seconds) == words


def test_the_time_left_is_that_of_steps_after_the_first_which_is_slow():
    stream, now = io.StringIO(), iter([60.0, 62.0, 64.0, 70.0, 72.0])
    progress = Progress(20, done=10, stream=stream, clock=lambda: next(now))
    for number in range(11, 16):
        progress.show(step(number))
        progress.set_steps(21)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 11/20", "step 14/21"]
    assert "left" not in lines[0]
    assert lines[1].endswith("busy 93 50 %  24 s left")


def test_plain_lines_come_every_ten_seconds_and_at_the_end():
    stream, now = io.StringIO(), iter([0.0, 4.0, 9.9, 10.0, 12.0, 13.0])
    progress = Progress(6, stream=stream, clock=lambda: next(now))
    for number in range(1, 7):
        progress.show(step(number))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/6", "step 4/6", "step 6/6"]
    assert lines[0].endswith("loss 10.000  running mean 11.000  rate 1.0e-03  norm 0.5  1,234 tokens/s  busy 93 50 %")
    assert "left" not in lines[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_starts_where_the_run_resumes():
    stream = Terminal()
    progress = Progress(100, done=40, stream=stream)
    progress.show(step(50))
    progress.set_steps(60)
    progress.say("a line of its own")
    progress.show(step(60))
    progress.close()
    text = stream.getvalue()
    assert "40/100" in text
    assert "60/60" in text
    assert "loss 0.167  running mean 0.183" in text
    assert "a line of its own\n" in text


def test_all_three_together(tmp_path):
    stream = io.StringIO()
    metrics = Metrics(tmp_path, steps=2, stream=stream)
    metrics.log(step(1))
    metrics.log_evaluation(1, 4.5, 2048)
    metrics.log(step(2))
    metrics.sync()
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    figures = json.loads(json.dumps(asdict(step(1))))
    assert lines[0] == {name: value for name, value in figures.items() if value is not None}
    assert lines[1] == {"step": 1, "validation_loss": 4.5, "validation_tokens": 2048}
    assert lines[2]["step"] == 2
    assert scalars(tmp_path / "tensorboard")["validation_loss"] == [(1, 4.5)]
    assert "step 1  validation loss 4.500 over 2,048 tokens" in stream.getvalue()


class Recorder:
    """Stands for a tracker."""

    def __init__(self):
        self.steps = []

    def write(self, record):
        self.steps.append(record["step"])

    def close(self):
        pass


def test_a_tracker_gets_steps_again_only_in_a_new_run_behind_the_step_gone_back_to(tmp_path):
    """The run has logged four steps, and continues after the second; without TensorBoard there are no files of it."""
    for goes_back, sent in ((False, [5, 6]), (True, [3, 4, 5, 6])):
        run(tmp_path / "metrics.jsonl", 4).close()
        options = {"steps": 6, "resume_step": 2, "tensorboard": False, "stream": io.StringIO()}
        metrics = Metrics(tmp_path, goes_back=goes_back, **options)
        recorder = Recorder()
        metrics.follow([recorder])
        for number in range(3, 7):
            metrics.log(step(number))
        metrics.close()
        assert recorder.steps == sent
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
