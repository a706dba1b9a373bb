"""The report at the end: its table, its prediction, and report.json."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evenpipe.train.report import (
    DeviceReport,
    MachineReport,
    Prediction,
    RunReport,
    ScheduleReport,
    TrainingReport,
    report_text,
    write_report,
)

BALANCED = Prediction(vocabulary="vocab-2", makespan=10.0, busy=(8.0, 8.0), bubble_rate=0.125)
FIRST_LAST = Prediction(vocabulary="first-last", makespan=17.0, busy=(4.0, 12.0), bubble_rate=0.25)
ZBV = ScheduleReport(name="zbv", replicas=1, devices=2, stages=4, microbatches=8, communicators=6, in_flight=(5, 4))
DEVICES = (
    DeviceReport(device=0, stages=(0, 3), busy=0.912, peak_memory_bytes=700 * 2**20, layers=4, vocabulary_rows=4096),
    DeviceReport(device=1, stages=(1, 2), busy=0.9, peak_memory_bytes=3 * 2**29, layers=4, vocabulary_rows=4095),
)


LOSSES = {"loss": 5.1234, "running_mean_loss": 5.4, "validation_loss": 5.2}
TRAINING = TrainingReport(steps=300, epoch=1.2345, tokens=307_200, seconds=200.0, **LOSSES)


def report(**changes):
    values = {
        "training": TRAINING,
        "schedule": ZBV,
        "devices": DEVICES,
        "prediction": BALANCED,
        "baseline": FIRST_LAST,
        "predicted_step_seconds": 0.5,
        "machine": MachineReport(processes=2, cores=2),
    }
    return RunReport(**{**values, **changes})


def test_the_report_in_words():
    assert report_text(report()).splitlines() == [
        "300 steps to epoch 1.23, 307,200 tokens in 200.0 s (1,536 tokens/s); "
        "loss 5.123 in the last step, 5.200 in validation",
        "schedule zbv: 4 stages on 2 devices (2 each), 8 microbatches, 6 communicators; predicted busy 80.0 %",
        "device    busy  peak memory  stages  layers  in flight  vocabulary rows",
        "     0  91.2 %    700.0 MiB     0 3       4          5            4,096",
        "     1  90.0 %      1.5 GiB     1 2       4          4            4,095",
        "a step took 0.667 s; 0.500 s are predicted from the devices' own work in this order; the rest is transfers, "
        "the optimizer, and other programs on these cores",
        "vocabulary vocab-2: a step is predicted to be 1.70 times as fast as with first-last;",
        "the busiest device has 1.00 times the mean work instead of 1.50",
    ]


SHARED = " share {}, on which that work alone takes {} s"
STEPS = [
    # processes, threads, cores, seconds of a step, how the line ends; 0.8 of the 0.5 s predicted are work
    (4, 1, 2, 0.9, f" with a core each, but 4 processes{SHARED.format('2 cores', '0.800')}"),
    (2, 4, 2, 0.9, f" with a core each, but 2 processes of 4 threads{SHARED.format('2 cores', '0.400')}"),
    (2, 1, 1, 0.9, f" with a core each, but 2 processes{SHARED.format('1 core', '0.800')}"),
    (2, 1, 2, 0.9, "; the rest is transfers, the optimizer, and other programs on these cores"),
    (2, 1, 2, 0.4, ""),
]


def test_why_a_step_takes_longer_than_predicted():
    for processes, threads, cores, seconds, end in STEPS:
        training = replace(TRAINING, steps=10, seconds=10 * seconds)
        machine = MachineReport(processes=processes, threads=threads, cores=cores)
        text = report_text(report(training=training, machine=machine))
        (line,) = (line for line in text.splitlines() if line.startswith("a step took"))
        predicted = "0.500 s are predicted from the devices' own work in this order"
        assert line == f"a step took {seconds:.3f} s; {predicted}{end}"


def test_the_report_of_several_replicas():
    devices = tuple(replace(device, replica=replica) for replica in (0, 1) for device in DEVICES)
    lines = report_text(report(schedule=replace(ZBV, replicas=2), devices=devices)).splitlines()
    assert "on 2 devices (2 each), 2 replicas, 8 microbatches" in lines[1]
    assert [line.split()[:2] for line in lines[2:7]] == [
        ["replica", "device"],
        *(["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]),
    ]


def test_the_report_of_first_last_itself_and_of_a_run_with_nothing_left_to_do():
    training = replace(TRAINING, validation_loss=None, steps=0, tokens=0, seconds=0.0)
    lines = report_text(report(prediction=FIRST_LAST, training=training)).splitlines()
    assert lines[0] == "0 steps to epoch 1.23, 0 tokens in 0.0 s (0 tokens/s); loss 5.123 in the last step"
    assert lines[-1].startswith("vocabulary first-last: embedding and output layer on the first and last device")
    assert "1.50 times the mean work" in lines[-1]


def test_the_report_as_json(tmp_path):
    write_report(report(), tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["predicted_speedup"] == pytest.approx(1.7)
    assert (content["steps"], content["validation_loss"], content["cores"]) == (300, 5.2, 2), "no table within a table"
    assert content["devices"][1]["peak_memory_bytes"] == 3 * 2**29
    assert content["baseline"]["busy"] == [4.0, 12.0]
    assert content["schedule"]["in_flight"] == [5, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
