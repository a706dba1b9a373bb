"""Runs of the trainer: interrupted and resumed, in one layout and in others, exported, and hit by what may go wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reference
import torch
from harness import run_outcomes, run_processes
from transformers import AutoModelForCausalLM

from evenpipe.schedule.trace_file import read_trace
from evenpipe.train import data as data_module
from evenpipe.train import trainer
from evenpipe.train.config import Config
from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data, prepare
from evenpipe.train.export import export_checkpoint

STEPS = 12
CONFIG = """
[model]
architecture = "llama"

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 64
tie_word_embeddings = {tied}

[data]
files = ["{text}"]
sequence_length = 32
validation_fraction = 0.05

[tokenizer]
vocabulary_size = 301

[pipeline]
processes = {processes}
vocabulary = "{vocabulary}"
microbatches = 4

[optimizer]
learning_rate = 1e-2
warmup_steps = 3

[training]
steps = {steps}

[checkpoint]
every_steps = 4

[output]
folder = "{folder}"
tensorboard = false
"""


def write_config(
    folder: Path, *, processes: int = 2, vocabulary: str = "vocab-2", steps: int = STEPS, tied: bool = True
) -> Path:
    """A configuration that trains on this file, with everything it writes in `folder`."""
    text = CONFIG.format(
        tied=str(tied).lower(),
        text=Path(__file__),
        processes=processes,
        vocabulary=vocabulary,
        steps=steps,
        folder=folder / "run",
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text(text)
    return path


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[int, float, float, float]]:
    """(step, loss, gradient norm, learning rate) of every step; validation losses as (step, loss)."""
    return [
        (line["step"], line["loss"], line["gradient_norm"], line["learning_rate"])
        if "loss" in line
        else (line["step"], line["validation_loss"])
        for line in logged(folder)
    ]


def evenpipe(*arguments: object, **options) -> subprocess.Popen[str]:
    """The command line in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "evenpipe.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output, output
    return output


class StoppedError(Exception):
    """Ends a run in the middle, as a kill would."""


def train_config_until(config: Config, until: int | None) -> None:
    """The trainer on the processes of the harness, stopped before step `until` is taken; None: to the end."""
    take_step = trainer._Run._step

    def step(run) -> None:
        if run.progress.step == until:
            raise StoppedError
        take_step(run)

    trainer._Run._step = step
    trainer.train(config)


def train_until(path: str, processes: int, vocabulary: str, until: int) -> None:
    overrides = [f"pipeline.processes={processes}", f'pipeline.vocabulary="{vocabulary}"']
    train_config_until(load_config(Path(path), overrides), until)


def run_part(path: Path, processes: int, vocabulary: str, until: int) -> None:
    arguments = (str(path), processes, vocabulary, until)
    if until == STEPS:
        run_processes(train_until, processes, *arguments)
    else:
        with pytest.raises(StoppedError):
            run_processes(train_until, processes, *arguments)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """A whole run of the command line, at p = 2 with vocab-2."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "console").write_text(finish(evenpipe("train", write_config(folder))))
    return folder


@pytest.mark.slow
def test_killed_at_random_steps_it_ends_with_the_same_curve(uninterrupted: Path, tmp_path: Path) -> None:
    """SIGKILL to the whole process group, twice; the same command again each time; equal to the last bit."""
    path = write_config(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    seed = random.randrange(2**32)
    print(f"steps drawn with seed {seed}")
    for lines in sorted(random.Random(seed).sample(range(1, STEPS), 2)):
        process = evenpipe("train", path)
        deadline = time.monotonic() + 1200
        while not metrics.exists() or metrics.read_text().count("\n") < lines:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(evenpipe("train", path))
    assert curve(tmp_path) == curve(uninterrupted)


# --- tensor ranks -----------------------------------------------------------------------------------------------------

TENSOR_LAYOUTS = (
    (3, ("pipeline.processes=4", "pipeline.tensor_parallel=2")),
    (6, ("pipeline.processes=4",)),
    (9, ("pipeline.processes=4", "pipeline.tensor_parallel=2", "pipeline.replicas=2", "pipeline.microbatches=2")),
    (None, ("pipeline.processes=2",)),
)
"""Layouts of one run, and the step at which each is stopped: 2 devices x 2 tensor ranks, 4 devices,
1 device x 2 tensor ranks in 2 replicas, 2 devices."""


def train_and_note_readers(path: str, overrides: tuple[str, ...], until: int | None, folder: str) -> None:
    """Each process that opens the tokens leaves a file with the step at which this part of the run ends."""
    open_rows = data_module.open_rows

    def noted(*arguments):
        (Path(folder) / f"{until}: {os.environ['RANK']}").touch()
        return open_rows(*arguments)

    data_module.open_rows = noted
    train_config_until(load_config(Path(path), ["checkpoint.every_steps=3", *overrides]), until)


def check_losses(folder: Path, other: Path) -> None:
    """In training and validation, of two runs in different layouts: fp32 adds up in another order."""
    found, wanted = ([(line[0], line[1]) for line in curve(one)] for one in (folder, other))
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-6)


def test_a_run_goes_on_with_and_without_tensor_ranks(uninterrupted: Path, tmp_path: Path) -> None:
    """The same losses and weights as without interruption; and only the first process of a replica reads data."""
    path, readers = write_config(tmp_path), tmp_path / "readers"
    readers.mkdir()
    prepare(load_config(path), say=lambda text: None)
    for until, overrides in TENSOR_LAYOUTS:
        processes = int(overrides[0].partition("=")[2])
        with pytest.raises(StoppedError) if until else contextlib.nullcontext():
            run_processes(train_and_note_readers, processes, str(path), overrides, until, str(readers))
    assert sorted(file.name for file in readers.iterdir()) == ["3: 0", "6: 0", "9: 0", "9: 2", "None: 0"]
    check_losses(tmp_path, uninterrupted)
    export_checkpoint(tmp_path / "run", tmp_path / "exported")
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (tmp_path / "exported", uninterrupted / "run" / "model")
    ]
    for name, weight in models[1].items():
        torch.testing.assert_close(models[0][name], weight, rtol=0, atol=1e-5)


def test_a_run_with_tensor_ranks_shows_all_of_its_processes(uninterrupted: Path, tmp_path: Path) -> None:
    """By the command line: validation, a trace, the report, export and text, as without."""
    path = write_config(tmp_path)
    path.write_text(path.read_text() + '[sample]\nprompts = ["import"]\n')
    options = ("pipeline.processes=4", "pipeline.tensor_parallel=2", "output.trace_steps=[5]")
    console = finish(evenpipe("train", path, *options))
    check_losses(tmp_path, uninterrupted)
    assert all(len(line["busy"]) == 4 for line in logged(tmp_path) if "busy" in line)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    places = [(one["device"], one["tensor_rank"]) for one in report["devices"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(one["peak_memory_bytes"] > 0 for one in report["devices"])
    assert sum(one["vocabulary_rows"] for one in report["devices"]) == 301
    assert re.search(r"device +tensor rank +busy", console)
    assert "import" in console.splitlines()[-1] or "\nimport" in console, console
    trace = read_trace(tmp_path / "run" / "traces" / "step-00000005.json")
    assert len(trace.by_rank) == 2 and all(row.passes for one in trace.by_rank for row in one.devices)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)


# --- other things that change no loss ---------------------------------------------------------------------------------


def test_what_is_on_the_host_changes_no_bit(uninterrupted: Path, tmp_path: Path) -> None:
    """Activations, and a share of the optimizer's moments; resumed with another share from the same checkpoints."""
    path = write_config(tmp_path)
    prepare(load_config(path), say=lambda text: None)
    text = path.read_text() + '[offload]\nactivations = "all"\n'
    for share, until in ((0.4, 6), (1.0, 10), (0.0, STEPS)):
        path.write_text(text.replace("warmup_steps = 3", f"warmup_steps = 3\nhost_share = {share}"))
        run_part(path, 2, "vocab-2", until)
    assert curve(tmp_path) == curve(uninterrupted)


def test_the_exported_folder_gives_the_same_loss(uninterrupted: Path) -> None:
    config = load_config(uninterrupted / "config.toml")
    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "run" / "model", dtype=torch.float32)
    batches = open_batches(config, open_data(config))
    total = tokens = 0.0
    for index in range(min(batches.validation_batches, config.training.evaluation_batches)):
        ids, labels, _ = batches.validation_batch(index)
        valid = int((labels[:, 1:] != reference.IGNORE).sum())
        with torch.no_grad():
            total += reference.loss_of(model, ids, labels).item() * valid
        tokens += valid
    validation = [line for line in logged(uninterrupted) if "validation_loss" in line][-1]
    assert tokens == validation["validation_tokens"]
    assert total / tokens == pytest.approx(validation["validation_loss"], rel=1e-6)


def test_loss_means_the_same_everywhere(uninterrupted: Path) -> None:
    """On the console, in metrics.jsonl, in report.json: that of the step; what is smoothed is the running mean."""
    *_, last, validation = logged(uninterrupted)
    report = json.loads((uninterrupted / "run" / "report.json").read_text())
    names = ("loss", "running_mean_loss")
    assert [report[name] for name in names] == [last[name] for name in names]
    assert last["loss"] != last["running_mean_loss"]
    assert report["validation_loss"] == validation["validation_loss"]
    console = (uninterrupted / "console").read_text()
    shown = f"epoch {last['epoch']:.2f}  loss {last['loss']:.3f}  running mean {last['running_mean_loss']:.3f}"
    assert f"step {STEPS}/{STEPS}  {shown}" in console
    assert f"loss {last['loss']:.3f} in the last step, {validation['validation_loss']:.3f} in validation" in console


def test_a_finished_run_started_again_changes_nothing(uninterrupted: Path) -> None:
    files = [uninterrupted / "run" / name for name in ("metrics.jsonl", "report.json")]
    before = [file.read_bytes() for file in files]
    first, _ = run_outcomes(train_to_the_end, 2, str(uninterrupted / "config.toml"))
    assert first.exit_code == 0 and f"all {STEPS} steps were done before" in first.printed, first.printed
    assert [file.read_bytes() for file in files] == before


def test_what_is_random_in_a_step_is_the_same_when_resumed(tmp_path: Path) -> None:
    """Dropout in the attention: masks follow from seed, step and device."""
    curves = []
    for name, stops in (("whole", (STEPS,)), ("parts", (6, STEPS))):
        path = write_config(tmp_path / name)
        text = path.read_text().replace("max_position", "attention_dropout = 0.3\nmax_position")
        path.write_text(text.replace("every_steps = 4", "every_steps = 2"))
        prepare(load_config(path), say=lambda text: None)
        for until in stops:
            run_part(path, 2, "vocab-2", until)
        curves.append(curve(tmp_path / name))
    assert curves[0] == curves[1]


def train_to_the_end(path: str) -> None:
    trainer.train(load_config(Path(path)))


def test_a_run_that_is_continued_says_if_its_order_is_arranged_anew(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("processes = 2", 'processes = 2\nschedule = "v-half"\narrange = "H100-80G"'))
    prepare(load_config(path), say=lambda text: None)
    run_part(path, 2, "vocab-2", 6)
    (again, _) = run_outcomes(train_until, 2, str(path), 2, "vocab-2", 9)
    assert "arranged" not in again.printed and "continuing from" in again.printed
    path.write_text(path.read_text().replace('"H100-80G"', '"auto"'))
    (other, _) = run_outcomes(train_to_the_end, 2, str(path))
    assert "the schedule was arranged by H100-80G, and is now by flops" in other.printed


def test_a_time_box_ends_a_run_early_and_is_kept_when_resumed(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=100_000)
    path.write_text(path.read_text().replace("steps = 100000", "steps = 100000\nminutes = 0.02"))
    prepare(load_config(path), say=lambda text: None)
    run_processes(train_to_the_end, 2, str(path))
    steps = logged(tmp_path)[-1]["step"]
    assert 1 <= steps < 100_000
    run_processes(train_to_the_end, 2, str(path))
    assert logged(tmp_path)[-1]["step"] == steps


def test_one_process_and_nothing_held_back(tmp_path: Path) -> None:
    path = write_config(tmp_path, processes=1, steps=4)
    text = path.read_text().replace("validation_fraction = 0.05", "validation_fraction = 0.0")
    path.write_text(text + "\n[loss]\nentropy = true\n")
    prepare(load_config(path), say=lambda text: None)
    run_processes(train_to_the_end, 1, str(path))
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(1 < line["entropy"] <= math.log(301) for line in lines)
    export_checkpoint(tmp_path / "run", tmp_path / "exported")


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_checkpoint_before_it_is_whole(tmp_path: Path) -> None:
    """One worker dies in the middle: exit code 3, one sentence, and the same command goes on."""
    path = write_config(tmp_path, steps=400)
    process = evenpipe("train", path)
    deadline = time.monotonic() + 1200
    while not list((tmp_path / "run" / "checkpoints").glob("step-00000004/manifest.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(worker_of(process.pid), signal.SIGKILL)
    output = finish(process, exit_code=3)
    assert "has died" in output or "killed" in output or "SIGKILL" in output, output
    export_checkpoint(tmp_path / "run", tmp_path / "exported")


def worker_of(launcher: int) -> int:
    """A training process below the launcher: one that has torch loaded and a parent that is no shell."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            threads = len(list((entry / "task").iterdir()))
        except (OSError, IndexError):
            continue
        if session == launcher and int(entry.name) != launcher:
            found.append((threads, int(entry.name)))
    return max(found)[1]  # a process of the pipeline has the most threads: those of its communicators


@pytest.mark.slow
def test_a_full_disk_is_exit_code_3_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the second checkpoint cannot be written."""
    finish(evenpipe("train", write_config(tmp_path, steps=4)))
    saved = newest_checkpoint(tmp_path)
    path = write_config(tmp_path, steps=8)
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "sys.argv = ['evenpipe', 'train', sys.argv[1]]; runpy.run_module('evenpipe.cli.main', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", limit, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = finish(process, exit_code=3)
    assert "step 8 was not saved" in output, output
    assert newest_checkpoint(tmp_path) == saved
    export_checkpoint(tmp_path / "run", tmp_path / "exported")


@pytest.mark.slow
def test_only_damaged_checkpoints_are_an_error_and_a_sound_one_before_is_taken(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=8)
    finish(evenpipe("train", path))
    flip_a_byte(newest_checkpoint(tmp_path))
    output = finish(evenpipe("train", path))
    assert "skipped checkpoint" in output and "step-00000004" in output, output
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        flip_a_byte(checkpoint)
    output = finish(evenpipe("train", path), exit_code=2)
    assert "no sound checkpoint" in output, output


def flip_a_byte(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
