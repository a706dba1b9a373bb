"""The report at the end and its file; throughput and peak memory; and what a run says that is asked to stop."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoint_run import save_three
from transformers import AutoConfig

from evenpipe.model import describe, layer_flops, training_flops
from evenpipe.train import throughput
from evenpipe.train.config_file import config_from_dict
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
from evenpipe.train.stopping import say_stop
from evenpipe.train.throughput import PeakMemory, Throughput

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


def test_on_gpus_the_time_in_passes_is_not_shown() -> None:
    devices = tuple(replace(device, busy=None) for device in report().devices)
    lines = report_text(report(devices=devices, predicted_step_seconds=None)).splitlines()
    assert lines[3] == "     0     -    700.0 MiB     0 3       4          5            4,096"


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


# ---- model FLOP/s, their share of the peak, and peak memory


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False}
LLAMA_MATRICES = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 100
QWEN_MOE = {**LLAMA, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
"""A router, and two of eight experts."""
QWEN_MATRICES = 3 * (32 * 32 * 2 + 2 * 32 * 16 + 32 * 8 + 2 * 3 * 32 * 24) + 32 * 100

MODELS = [
    # model type, sizes, elements of the matrices that a token meets, attended keys of a sequence of 16
    ("llama", LLAMA, LLAMA_MATRICES, 17 / 2),
    ("llama", {**LLAMA, "tie_word_embeddings": True}, LLAMA_MATRICES, 17 / 2),
    ("qwen3_moe", QWEN_MOE, QWEN_MATRICES, 17 / 2),
    ("mistral", {**LLAMA, "sliding_window": 4}, LLAMA_MATRICES, (1 + 2 + 3 + 13 * 4) / 16),
]


def test_flops_of_a_training_step() -> None:
    """6 per token and element of a matrix, and 12 per attended key and element of a query, in each layer."""
    for kind, sizes, matrices, keys in MODELS:
        description = describe(AutoConfig.for_model(kind, **sizes))
        flops = training_flops(description, 16)
        assert flops == pytest.approx(6 * matrices + 12 * 3 * keys * 32, rel=1e-12), kind
        assert flops < 3 * (sum(layer_flops(description, 16)) + 2 * 32 * 100), "masked pairs"


def settings(**model: object):
    return config_from_dict({"model": {"architecture": "llama", **model}, "data": {"files": ["a.txt"]}})


CARDS = [
    # name in torch, compute_dtype, precision of fp32 products, peak
    ("NVIDIA H100 80GB HBM3", "auto", "highest", 989.4e12),
    ("NVIDIA H100 80GB HBM3", "float32", "highest", 66.9e12),
    ("NVIDIA H100 80GB HBM3", "float32", "high", None),
    ("NVIDIA A100-SXM4-40GB", "bfloat16", "high", 312e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "auto", "highest", None),
    ("NVIDIA GeForce RTX 4090", "auto", "highest", None),
]


def test_the_share_of_the_peak_is_there_if_the_cards_of_all_processes_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peak of the other process is that of an A100."""
    monkeypatch.setattr(throughput, "training_flops", lambda description, sequence: 6e9)
    for name, dtype, precision, peak in CARDS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        pipeline = SimpleNamespace(
            description=None, torch_device=torch.device("cuda"), gather_numbers=lambda own: [own, [312e12]]
        )
        run = Throughput(pipeline, settings(compute_dtype=dtype))
        expected = None if peak is None else pytest.approx(6e14 / (peak + 312e12), rel=1e-12)
        assert (run.utilization(1e5), run.teraflops_per_second(1e5)) == (expected, 300.0), name


def test_peak_memory_on_a_gpu_is_that_of_the_steps_of_a_line_and_that_of_the_run(monkeypatch):
    """Building the model takes 90, steps 50 and 60, an evaluation between them 70."""
    peak = [90]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 10))
    memory, taken = PeakMemory(torch.device("cuda")), []
    memory.restart()
    for step, evaluation in ((50, 70), (60, 0)):
        peak[0] = max(peak[0], step)
        taken.append(memory.take())
        peak[0] = max(peak[0], evaluation)
        memory.restart()
    assert taken == [50, 60]
    assert memory.of_run == 90


# ---- what a run says that is asked to stop, and what it has lost when it ends at once


def test_a_first_signal_lets_the_step_finish_and_a_second_one_says_what_is_lost(tmp_path, capsys):
    tables = {"model": {"architecture": "llama"}, "data": {"files": "a.txt"}, "output": {"folder": str(tmp_path)}}

    def said(number: int, *, ends: bool) -> str:
        say_stop(config_from_dict(tables), number, ends)
        return capsys.readouterr().err

    assert "Ctrl-C: finishing the step and saving" in said(signal.SIGINT, ends=False)
    assert "SIGTERM: finishing the step and saving" in said(signal.SIGTERM, ends=False)
    assert "no step was saved, so all steps are lost" in said(signal.SIGINT, ends=True)
    newest, *_ = sorted(save_three(tmp_path / "checkpoints").glob("step-*"), reverse=True)
    assert "steps after 3, the last one saved, are lost" in said(signal.SIGINT, ends=True)
    next(newest.glob("*.distcp")).unlink()
    assert "steps after 2, the last one saved, are lost" in said(signal.SIGTERM, ends=True)
