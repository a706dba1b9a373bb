"""metrics.jsonl across interruptions, TensorBoard, trackers, progress on and off a terminal, and the running mean."""

from __future__ import annotations

import io
import json
import math
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from evenpipe.errors import InputError
from evenpipe.train import trackers
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.metrics import (
    Metrics,
    MetricsFile,
    Progress,
    RunningMean,
    StepMetrics,
    TensorBoard,
    progress_text,
    time_text,
)
from evenpipe.train.start import set_up
from evenpipe.train.trackers import Tracker, check_trackers


def step(number: int, **changes: Any) -> StepMetrics:
    """The figures of a step, as a run logs them."""
    figures = {
        "step": number,
        "epoch": number / 4,
        "loss": 10.0 / number,
        "running_mean_loss": 11.0 / number,
        "tokens": 1024 * number,
        "tokens_per_second": 1234.5,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "busy": (0.934, 0.5),
        "seconds": 0.25,
        "teraflops_per_second": 0.01,
        "peak_memory_bytes": (300, 200),
    }
    return StepMetrics(**{**figures, **changes})


def run(path, steps, resume_step=0, evaluate_every=4):
    """Log steps behind `resume_step`, each fourth with an evaluation."""
    file = MetricsFile(path, resume_step)
    for number in range(resume_step + 1, steps + 1):
        file.write({"step": number, "loss": 1 / number})
        if number % evaluate_every == 0:
            file.write({"step": number, "validation_loss": 2 / number})
    return file


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one_wherever_it_was_cut_off(tmp_path):
    run(tmp_path / "whole.jsonl", 12).close()
    whole = (tmp_path / "whole.jsonl").read_bytes()
    run(tmp_path / "cut.jsonl", 10)  # killed: neither synced nor closed
    with (tmp_path / "cut.jsonl").open("ab") as file:
        file.write(b'noise\n{"loss": 1}\n{"step": 11, "lo')
    run(tmp_path / "cut.jsonl", 12, resume_step=4).close()
    assert (tmp_path / "cut.jsonl").read_bytes() == whole
    for cut_at in range(0, 100, 7):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut_at])
        run(tmp_path / "cut.jsonl", 12, resume_step=whole[:cut_at].count(b"\n")).close()
        assert (tmp_path / "cut.jsonl").read_bytes() == whole
    run(tmp_path / "cut.jsonl", 1).close()
    assert (tmp_path / "cut.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n', "a run from the beginning has its own"


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


def test_many_devices_are_busy_from_the_least_to_the_most():
    many = step(2, busy=tuple(number / 100 for number in range(31, 95)))
    assert progress_text(many).endswith("1,234 tokens/s  busy 31 to 94 %")
    assert progress_text(step(1, busy=None)).endswith("1,234 tokens/s")  # on GPUs


def test_times_in_words():
    times = {0.2: "1 s", 59.0: "59 s", 60.0: "1 min", 3540.5: "1 h 00 min", 11050: "3 h 05 min", 198000: "2 d 7 h"}
    assert {seconds: time_text(seconds) for seconds in times} == times


def test_the_time_left_is_that_of_steps_after_the_first_which_is_slow():
    stream, now = io.StringIO(), iter([60.0, 62.0, 64.0, 70.0, 72.0])
    progress = Progress(20, steps_done=10, stream=stream, clock=lambda: next(now))
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
    progress = Progress(100, steps_done=40, stream=stream)
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


# ---- Weights & Biases and trackio, by packages of these names that write down their calls


class Recorder:
    """Stands for one of the packages."""

    def __init__(self):
        self.opened: list[dict] = []
        self.logged: list[tuple[int, dict]] = []
        self.finished = 0
        self.fails: set[str] = set()
        self.waits = False

    def _fail(self, name):
        if name in self.fails:
            raise ConnectionError("no route to the host\nand more")

    def init(self, **options):
        self._fail("init")
        self.opened.append(options)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, figures, step):
        self._fail("log")
        self.logged.append((step, figures))

    def finish(self):
        self._fail("finish")
        if self.waits:
            threading.Event().wait()
        self.finished += 1


@pytest.fixture
def packages(monkeypatch):
    recorders = {name: Recorder() for name in ("wandb", "trackio")}
    for name, recorder in recorders.items():
        monkeypatch.setitem(sys.modules, name, recorder)
    return recorders


def configured(**output):
    return config_from_dict({"model": {"architecture": "llama"}, "data": {"files": ["a"]}, "output": output})


def start(folder, steps, *, resume_step=0, project="mine", goes_back=False):
    """A start of a run that logs the steps behind `resume_step`, with an evaluation at the last; what it said."""
    config = configured(folder=str(folder), trackers=["wandb", "trackio"], project=project, tensorboard=False)
    stream = io.StringIO()
    options = {"tensorboard": False, "stream": stream, "goes_back": goes_back}
    metrics = Metrics(folder, steps=steps, resume_step=resume_step, **options)
    metrics.follow(Tracker(name, config, metrics.say) for name in config.output.trackers)
    for number in range(resume_step + 1, steps + 1):
        metrics.log(step(number))
    metrics.log_evaluation(steps, 3.5, 99)
    metrics.close()
    return [line for line in stream.getvalue().splitlines() if "loss" not in line]


def test_trackers_get_what_the_file_of_metrics_gets(packages, tmp_path):
    assert start(tmp_path / "run", 2) == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("busy", "peak_memory_bytes"):
            line.update({f"{name}/device {device}": value for device, value in enumerate(line.pop(name, []))})
    for recorder in packages.values():
        assert [{"step": number, **figures} for number, figures in recorder.logged] == lines
        assert [number for number, _ in recorder.logged] == [1, 2, 2]
        assert recorder.finished == 1
        (options,) = recorder.opened
        assert options["project"] == "mine"
        assert options["config"]["output"]["folder"] == str(tmp_path / "run")
    assert packages["wandb"].opened[0]["name"] == "run"
    assert packages["wandb"].opened[0]["dir"] == str(tmp_path / "run")
    assert packages["trackio"].opened[0]["name"].startswith("run-")


def test_a_resumed_run_goes_on_in_the_same_runs_and_sends_no_step_twice(packages, tmp_path):
    start(tmp_path / "run", 5)
    start(tmp_path / "run", 8, resume_step=3)
    for name, key in (("wandb", "id"), ("trackio", "name")):
        recorder = packages[name]
        assert [number for number, _ in recorder.logged] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 8]
        first, second = recorder.opened
        assert first[key] == second[key]
        assert first["resume"] == second["resume"] == "allow"
    assert not (tmp_path / "run" / "tensorboard").exists()
    packages["wandb"].logged.clear()
    start(tmp_path / "run", 9, resume_step=6, goes_back=True)  # in a new run, behind the step gone back to
    assert [number for number, _ in packages["wandb"].logged] == [7, 8, 9, 9]
    start(tmp_path / "run", 9, resume_step=9, project="another")
    start(tmp_path / "other", 1)
    for name, key in (("wandb", "id"), ("trackio", "name")):
        assert len({options[key] for options in packages[name].opened}) == 3


def test_a_tracker_that_fails_ends_nothing_and_is_one_line(packages, tmp_path, monkeypatch):
    for ended, moment in enumerate(("log", "finish"), start=1):
        packages["wandb"].fails, packages["trackio"].logged = {moment}, []
        assert start(tmp_path / moment, 4) == [
            "wandb has failed and gets no more metrics until the next start: ConnectionError: no route to the host"
        ]
        assert [number for number, _ in packages["trackio"].logged] == [1, 2, 3, 4, 4]
        assert packages["trackio"].finished == ended
        assert (tmp_path / moment / "metrics.jsonl").read_text().count("\n") == 5
    packages["wandb"].fails = set()
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    packages["wandb"].waits = True
    assert start(tmp_path / "run", 1) == ["wandb did not send all metrics within 0.1 s; the rest is lost"]
    assert packages["trackio"].finished == 3


def test_a_tracker_that_cannot_be_opened_is_refused_at_first_and_passed_over_later(packages, tmp_path):
    packages["wandb"].fails = {"init"}
    words = r'^output\.trackers names "wandb", but it cannot be opened: ConnectionError: no route to the host$'
    with pytest.raises(InputError, match=words):
        start(tmp_path / "run", 1)
    packages["wandb"].fails = set()
    start(tmp_path / "run", 1)
    packages["wandb"].fails = {"init"}
    (said,) = start(tmp_path / "run", 2, resume_step=1)
    assert said.startswith("wandb has failed")
    packages["wandb"].fails = set()
    start(tmp_path / "run", 3, resume_step=2)
    assert len({options["id"] for options in packages["wandb"].opened}) == 1


def test_a_tracker_that_is_not_installed_is_a_sentence(monkeypatch, tmp_path):
    """Also a folder of that name is no package; and a run is refused before anything is prepared."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check_trackers(["json"])
    with pytest.raises(InputError, match=r'^output\.trackers names "trackio", .* pip install trackio$'):
        check_trackers(["json", "trackio"])
    with pytest.raises(InputError, match="pip install only_a_folder"):
        check_trackers(["only_a_folder"])
    with pytest.raises(InputError, match="pip install wandb"):
        set_up(configured(folder=str(tmp_path / "run"), trackers="wandb"), force=False)
    assert not (tmp_path / "run").exists()
