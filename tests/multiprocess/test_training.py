"""Runs of the trainer: interrupted and resumed, in one layout and in others, exported, hit by what may go wrong, and
asked to stop."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import process_groups
import pytest
import reference
import torch
from harness import run_processes
from training_runs import (
    STEPS,
    curve,
    evenpipe,
    finish,
    logged,
    newest_checkpoint,
    prepared,
    report_of,
    sentences,
    start,
    steps_logged,
    train,
    train_config_until,
    worker_of,
    write_config,
)
from transformers import AutoModelForCausalLM

from evenpipe.checkpoints import find_latest
from evenpipe.errors import InputError
from evenpipe.schedule.trace_file import read_trace
from evenpipe.train import data as data_module
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data
from evenpipe.train.export import export_checkpoint
from evenpipe.train.learning_rates import learning_rate


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole run of the command line, with its console."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    path = write_config(folder, {"model.self_check": True, "output.export": True, "sample.prompts": ["one device"]})
    (folder / "console").write_text(finish(evenpipe("train", path)))
    return folder


def copy_of(finished: Path, folder: Path) -> tuple[Path, str]:
    """Copy a run; return its configuration and the override that names the copy."""
    shutil.copytree(finished / "run", folder / "run")
    return finished / "config.toml", f"output.folder={folder / 'run'}"


# --- interrupted and resumed in one layout ----------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_steps_it_ends_with_the_same_curve(uninterrupted: Path, tmp_path: Path) -> None:
    """SIGKILL to the whole process group, twice; the same command again each time; equal to the last bit."""
    path = write_config(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    seed = random.randrange(2**32)
    print(f"steps drawn with seed {seed}")
    for lines in sorted(random.Random(seed).sample(range(1, STEPS), 2)):
        process = evenpipe("train", path)
        while not metrics.exists() or metrics.read_text().count("\n") < lines:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process_groups.kill(process)
    finish(evenpipe("train", path))
    assert curve(tmp_path) == curve(uninterrupted)


@pytest.mark.slow
def test_what_is_on_the_host_changes_no_bit(uninterrupted: Path, tmp_path: Path) -> None:
    """Activations, and a share of the optimizer's moments; resumed with another share from the same checkpoints."""
    path = prepared(tmp_path, {"offload.activations": "all"})
    for share, until in ((0.4, 6), (1.0, 10), (0.0, None)):
        printed = train(path, f"optimizer.host_share={share}", until=until)
    assert "continuing from" in printed and "the schedule was arranged" not in printed
    assert curve(tmp_path) == curve(uninterrupted)


TIME_BOXED = [{"training.steps": 100_000}, {"training.steps": None, "training.epochs": 10_000}]


@pytest.mark.parametrize("length", TIME_BOXED, ids=["steps", "epochs"])
@pytest.mark.sampled(1)
def test_a_time_box_ends_a_run_early_and_once_for_all(length: dict[str, Any], tmp_path: Path) -> None:
    """Started again, a finished run changes none of its files."""
    path = prepared(tmp_path, {**length, "training.minutes": 0.01})
    train(path)
    steps = logged(tmp_path)[-1]["step"]
    assert 10 <= steps < 100_000
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "report.json")]
    before = [file.read_bytes() for file in files]
    assert f"all {steps} steps were done before" in train(path)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.slow
def test_a_run_that_continues_says_what_has_changed(uninterrupted: Path, tmp_path: Path) -> None:
    path, folder = copy_of(uninterrupted, tmp_path)
    options = ("training.steps=13", "optimizer.learning_rate=0.005", "pipeline.microbatches=6", "training.seed=1")
    printed = train(path, folder, *options, "model.config.attention_dropout=0.1", "pipeline.arrange=H100-80G")
    (changed,) = re.findall(r"changed since then: (.*)\n", printed)
    for value in (
        "training.steps: 12 -> 13",
        "optimizer.learning_rate: 0.01 -> 0.005",
        "pipeline.microbatches: 4 -> 6",
        "training.seed: 0 -> 1",
    ):
        assert value in changed.split(", ")
    assert "the model's attention_dropout is now 0.1, was 0.0\n" in printed
    assert "the schedule was arranged by flops, and is now by H100-80G" in printed
    assert [line[0] for line in curve(tmp_path)][-2:] == [STEPS + 1, STEPS + 1]


def test_one_process_and_nothing_held_back(tmp_path: Path) -> None:
    sizes = {"pipeline.processes": 1, "training.steps": 4, "data.validation_fraction": 0.0}
    train(prepared(tmp_path, {**sizes, "loss.entropy": True}))
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(1 < line["entropy"] <= math.log(301) for line in lines)
    export_checkpoint(tmp_path / "run", tmp_path / "exported")


# --- other optimizers -------------------------------------------------------------------------------------------------

MINE = """
import torch

def make(named_parameters, lr, factor):
    parameters = dict(named_parameters)
    return torch.optim.Adam([
        {"params": [one for one in parameters.values() if one.dim() > 1]},
        {"params": [one for one in parameters.values() if one.dim() < 2], "lr": factor * lr},
    ], lr=lr)
"""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {"name": "adafactor"},
    "sgd": {"name": "sgd", "options": {"momentum": 0.9}},
    "muon": {"name": "muon", "schedule": "warmup-stable-decay", "decay_steps": 4},
    "own": {"name": "mine:make", "options": {"factor": 0.1}, "schedule": "linear"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_another_optimizer_is_resumed_to_the_last_bit(tmp_path: Path, optimizer: str) -> None:
    """With dropout, too: its masks follow from seed, step and process."""
    changes = {f"optimizer.{name}": value for name, value in OPTIMIZERS[optimizer].items()}
    changes |= {"pipeline.dp": 2, "pipeline.data_parallel": "shard", "model.config.attention_dropout": 0.3}
    whole, parts = (prepared(tmp_path / name, changes) for name in ("whole", "parts"))
    for path in (whole, parts):
        path.with_name("mine.py").write_text(MINE)
    train(whole)
    train(parts, until=6)
    train(parts)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    rates = [line["learning_rate"] for line in steps_logged(tmp_path / "parts")]
    assert rates == [learning_rate(step, STEPS, load_config(parts).optimizer) for step in range(STEPS)]
    other = "muon" if optimizer == "sgd" else "sgd"
    changes |= {"optimizer.name": other, "optimizer.options": None, "training.steps": 13}
    failure = start(write_config(parts.parent, changes)).exception
    assert isinstance(failure, InputError)
    words = r"optimizer: it is (SGD|Muon), but the checkpoint .* was saved with (Adafactor|Muon|Adam|SGD);"
    assert re.search(words, str(failure)), failure


# --- in other layouts -------------------------------------------------------------------------------------------------

REPLICAS = ("pipeline.dp=2", "pipeline.microbatches=2", "pipeline.data_parallel=shard")
PARTS = [
    # overrides of each part of the run, and the number of steps after which it is stopped
    (("pipeline.processes=2", "pipeline.schedule=zbv", "pipeline.vocabulary=first-last"), 4),
    (("pipeline.processes=3", "pipeline.schedule=1f1b"), 6),
    (("pipeline.processes=4", "pipeline.tp=2", *REPLICAS), 8),
    (("pipeline.processes=4", "pipeline.tp=2", "output.trace_steps=[9]"), None),
]


def train_and_note_readers(path: str, overrides: Sequence[str], until: int | None, folder: str) -> None:
    """Each process that opens the tokens leaves a file with the step at which this part of the run ends."""
    open_rows = data_module.open_rows

    def noted(*arguments: Any) -> Any:
        (Path(folder) / f"{until}: {os.environ['RANK']}").touch()
        return open_rows(*arguments)

    data_module.open_rows = noted
    train_config_until(load_config(path, overrides), until)


def test_a_run_goes_on_in_other_layouts_and_schedules(uninterrupted: Path, tmp_path: Path) -> None:
    """The losses and weights are those without interruption; fp32 adds up in another order. The report and a trace
    show all processes, and only the first process of a replica reads data."""
    path, readers = prepared(tmp_path, {"checkpoint.every_steps": 2}), tmp_path / "readers"
    readers.mkdir()
    for overrides, until in PARTS:
        processes = load_config(path, overrides).pipeline.processes
        run_processes(train_and_note_readers, processes, str(path), overrides, until, str(readers))
    assert sorted(file.name for file in readers.iterdir()) == ["4: 0", "6: 0", "8: 0", "8: 2", "None: 0"]
    found, wanted = ([(line[0], line[1]) for line in curve(folder)] for folder in (tmp_path, uninterrupted))
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-6)
    exported = export_checkpoint(tmp_path / "run", tmp_path / "exported")
    ours, weights = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (exported, uninterrupted / "run" / "model")
    )
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5)

    lines = steps_logged(tmp_path)
    check_figures(lines[:4], 2)
    check_figures(lines[4:6], 3)
    check_figures(lines[6:], 4)
    devices = report_of(tmp_path)["devices"]
    assert [(device["device"], device["tensor_rank"]) for device in devices] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(device["peak_memory_bytes"] > 0 for device in devices)
    assert sum(device["vocabulary_rows"] for device in devices) == 301
    trace = read_trace(tmp_path / "run" / "traces" / "step-00000009.json")
    assert len(trace.by_rank) == 2 and all(row.passes for rank in trace.by_rank for row in rank.devices)


# --- what a run says of itself ----------------------------------------------------------------------------------------

MATRICES = 4 * (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 32)
"""Elements in the layers of the model; attention has 4 layers of 2 heads of 8."""


def check_figures(lines: list[dict[str, Any]], processes: int) -> None:
    """Check the figures of steps, whatever the processes are: devices, replicas or tensor ranks."""
    per_token = 6 * (MATRICES + 301 * 16) + 12 * 4 * 33 / 2 * 16
    for line in lines:
        figure = per_token * line["tokens_per_second"] / processes / 1e12
        assert line["teraflops_per_second"] == pytest.approx(figure, rel=1e-12)
        assert len(line["busy"]) == len(line["peak_memory_bytes"]) == processes
        assert all(size > 20 << 20 for size in line["peak_memory_bytes"])
        assert "model_flops_utilization" not in line, "nobody knows the peak of this CPU"


def test_figures_are_the_same_on_the_console_in_the_metrics_and_in_the_report(uninterrupted: Path) -> None:
    """The loss is that of the step; what is smoothed is the running mean."""
    *_, last, validation = logged(uninterrupted)
    check_figures(steps_logged(uninterrupted), 2)
    report = report_of(uninterrupted)
    for name in ("loss", "running_mean_loss"):
        assert report[name] == last[name]
    assert last["loss"] != last["running_mean_loss"]
    assert report["validation_loss"] == validation["validation_loss"]
    console = (uninterrupted / "console").read_text()
    step = f"epoch {last['epoch']:.2f}  loss {last['loss']:.3f}  running mean {last['running_mean_loss']:.3f}"
    rest = f"rate {last['learning_rate']:.1e}  norm {last['gradient_norm']:.3g}"
    line = rf"^step {STEPS}/{STEPS}  {re.escape(step)}  .*{re.escape(rest)}  [\d,]+ tokens/s  busy \d+ \d+ %$"
    assert re.search(line, console, re.MULTILINE), console
    assert f"loss {last['loss']:.3f} in the last step, {validation['validation_loss']:.3f} in validation" in console
    assert re.search(r"^one device", console, re.MULTILINE), "the text of the prompt"


# --- epochs, and validation on data of its own ------------------------------------------------------------------------

EPOCHS = 1.4
LAYOUTS: dict[str, dict[str, Any]] = {
    "devices": {},
    "replicas": {"pipeline.dp": 2, "pipeline.microbatches": 2},  # of one device each, with the whole vocabulary
}


def write_short_run(folder: Path, layout: str) -> Path:
    """Some forty rows to train on, and to evaluate on more than eight batches, of which the last is of one row."""
    folder.mkdir()
    files = {}
    for name, number, seed in (("files", 66, 1), ("validation_files", 59, 2)):
        path = folder / f"{name}.txt"
        path.write_text(sentences(number, seed))
        files[f"data.{name}"] = [str(path)]
    length = {"training.steps": None, "training.epochs": EPOCHS, "training.evaluate_every_steps": 3}
    length |= {"training.evaluation_batches": "none", "data.validation_fraction": None}
    return prepared(folder, {**files, **length, **LAYOUTS[layout]})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(1)
def test_epochs_are_so_many_steps_all_validation_counts_and_a_part_resumes(tmp_path: Path, layout: str) -> None:
    """The last batch of validation is smaller than the number of microbatches, and one of the replicas has no row of
    it. Its loss is that of transformers, and a resumed run has the same bits."""
    whole, parts = (write_short_run(tmp_path / name, layout) for name in "ab")
    config = load_config(whole)
    batches = open_batches(config, open_data(config))
    rows = len(batches.training_rows)
    steps = -(-14 * rows // 40)
    train(whole)
    train(parts, until=steps - 2)
    train(parts)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")

    lines = steps_logged(tmp_path / "a")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["epoch"] for line in lines] == [4 * line["step"] / rows for line in lines]
    assert lines[-2]["epoch"] < EPOCHS <= lines[-1]["epoch"]

    held_back = torch.from_numpy(batches.validation.astype("int64"))
    assert len(held_back) % config.pipeline.sequences_per_step == 1
    validation = logged(tmp_path / "a")[-1]
    assert validation["validation_tokens"] == held_back[:, 1:].numel()
    exported = export_checkpoint(tmp_path / "a" / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference.loss_of(model, held_back, held_back).item()
    assert validation["validation_loss"] == pytest.approx(wanted, rel=1e-6)
    report = report_of(tmp_path / "a")
    assert (report["epoch"], report["validation_loss"]) == (lines[-1]["epoch"], validation["validation_loss"])


# --- what may go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_checkpoint_before_it_is_whole(tmp_path: Path) -> None:
    """One worker dies in the middle: exit code 3 and one sentence, and the others leave records of what they did."""
    process = evenpipe("train", write_config(tmp_path, {"training.steps": 400}))
    while not list((tmp_path / "run" / "checkpoints").glob("step-00000004/manifest.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(worker_of(process.pid), signal.SIGKILL)
    output = finish(process, exit_code=3)
    assert "has died" in output or "killed" in output or "SIGKILL" in output, output
    export_checkpoint(tmp_path / "run", tmp_path / "exported")
    records = sorted((tmp_path / "run" / "flight_recorder").iterdir())
    assert records and all(record.name.startswith("gloo-") for record in records)
    names = {entry["profiling_name"] for entry in json.loads(records[0].read_text())["entries"]}
    assert "gloo:all_gather" in names


def test_options_without_an_effect_are_named_and_impossible_ones_refused_before_a_step(tmp_path: Path) -> None:
    path = prepared(tmp_path, {"pipeline.context_exchange": "keys", "experts.router_bias_rate": 0.1})
    outcome = start(path)
    assert "context_exchange = 'keys' has no effect: there is one context rank" in outcome.printed
    assert isinstance(outcome.exception, InputError)
    assert str(outcome.exception).startswith("experts.router_bias_rate is 0.1, but no router of LlamaForCausalLM has a")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_damaged_checkpoint_is_skipped_and_without_a_sound_one_nothing_begins(
    uninterrupted: Path, tmp_path: Path
) -> None:
    path, folder = copy_of(uninterrupted, tmp_path)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    flip_a_byte(checkpoints[-1])
    printed = train(path, folder)
    assert "skipped checkpoint step-00000012" in printed and "continuing from" in printed, printed
    assert curve(tmp_path) == curve(uninterrupted)
    assert find_latest(tmp_path / "run" / "checkpoints").checkpoint.step == STEPS
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        flip_a_byte(checkpoint)
    failure = start(path, folder).exception
    assert isinstance(failure, InputError) and "no sound checkpoint" in str(failure)


def flip_a_byte(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# --- runs that are asked to stop: by Ctrl-C or SIGTERM, with the local launcher and under torchrun --------------------

# Nothing here depends on how long anything takes: a signal is sent once a line of metrics.jsonl shows that steps are
# being taken, and what is waited for is a process that ends.
started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    while started:
        process = started.pop()
        if process.poll() is None:
            process.kill()  # what it has started ends with it
            process.communicate()


def torchrun(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "evenpipe.cli.main", "train", str(path)]
    return process_groups.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def local(path: Path) -> subprocess.Popen[str]:
    return evenpipe("train", path)


def child_of(process: int) -> int:
    """One of those that torchrun has started, each in a session of its own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(children[-1])


def steps_of(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def train_beyond(steps: int, launcher: Callable[[Path], subprocess.Popen[str]], path: Path) -> subprocess.Popen[str]:
    """A run that has taken more than so many steps in all, and goes on."""
    process = launcher(path)
    started.append(process)
    while steps_of(path.parent) <= steps:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return process


LONG = {"training.steps": 100_000, "checkpoint.every_steps": "none"}
"""More steps than a run will take, with no checkpoint before the last one."""


WAYS = [
    # how it is started, who gets which signal, and the exit code; torchrun's own is 1, whatever its processes say
    (local, os.killpg, signal.SIGINT, 130),  # Ctrl-C
    (torchrun, os.kill, signal.SIGTERM, None),
    (local, os.killpg, signal.SIGTERM, 143),  # as Slurm does
]


def test_stopped_in_every_way_it_goes_on_as_if_nothing_had_happened(tmp_path: Path, sample) -> None:
    """One run, stopped each time and continued by the same command, has the curve of one that was not stopped."""
    path = write_config(tmp_path / "parts", LONG)
    for launcher, send, number, exit_code in sample(WAYS, 1):
        process = train_beyond(steps_of(path.parent), launcher, path)
        send(process.pid, number)
        output, _ = process.communicate(timeout=1200)
        step = int(newest_checkpoint(path.parent).name.removeprefix("step-"))
        assert process.returncode == exit_code or (exit_code is None and process.returncode), output
        assert f"stopped at step {step}; continue with the same command" in output, output
        assert "finishing the step" in output, output
        assert step == steps_of(path.parent)
        assert exit_code is None or "Traceback" not in output, output
    whole = prepared(tmp_path / "whole", LONG)
    train(whole, until=step)
    assert curve(whole.parent) == curve(path.parent)


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    """One process of the run is stopped, so no step can be finished."""
    process = train_beyond(0, local, write_config(tmp_path, LONG))
    os.kill(worker_of(process.pid), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "finishing the step" not in (line := process.stdout.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    output = finish(process, exit_code=130)
    assert "no step was saved, so all steps are lost" in output, output
    assert "stopped at" not in output


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_under_torchrun_a_process_that_died_is_still_the_first_cause(tmp_path: Path, asked: bool) -> None:
    """Torchrun sends SIGTERM to the others then, which is no wish to stop."""
    path = write_config(tmp_path, LONG)
    process = train_beyond(0, torchrun, path)
    victim = child_of(process.pid)
    os.kill(victim, signal.SIGKILL)
    if asked:
        process.terminate()
    output, _ = process.communicate(timeout=1200)
    assert process.returncode
    assert f"(pid {victim}) has died: killed, out of memory or crashed" in output, output
    assert "stopped at" not in output


@pytest.mark.slow
def test_before_the_first_step_a_signal_ends_at_once(tmp_path: Path) -> None:
    """Nothing is lost then, and there is nothing to finish."""
    path = write_config(tmp_path, LONG)
    process = local(path)
    while not (tmp_path / "run" / "data").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = finish(process, exit_code=143)
    assert "finishing" not in output and "lost" not in output
