"""What Weights & Biases and trackio are told, by packages of these names that write down their calls."""

from __future__ import annotations

import io
import json
import sys
import threading
from types import SimpleNamespace

import pytest
from logged_steps import step

from evenpipe.errors import InputError
from evenpipe.train import trackers
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.metrics import Metrics
from evenpipe.train.start import set_up
from evenpipe.train.trackers import Tracker, check_trackers


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


def start(folder, steps, *, resume_step=0, project="mine"):
    """A start of a run that logs the steps behind `resume_step`, with an evaluation at the last; what it said."""
    config = configured(folder=str(folder), trackers=["wandb", "trackio"], project=project, tensorboard=False)
    stream = io.StringIO()
    metrics = Metrics(folder, steps=steps, resume_step=resume_step, tensorboard=False, stream=stream)
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
    start(tmp_path / "run", 8, resume_step=8, project="another")
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
