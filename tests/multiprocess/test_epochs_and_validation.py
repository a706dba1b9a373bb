"""A run of epochs, evaluated on data of its own: how long it is, what it counts, and how it resumes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import reference
import torch
from harness import run_processes
from test_training import StoppedError, curve, logged, train_config_until, write_config
from transformers import AutoModelForCausalLM

from evenpipe.train.config_file import load_config
from evenpipe.train.data import open_batches, open_data, prepare
from evenpipe.train.export import export_checkpoint

EPOCHS = 1.4
VALIDATED = 59  # sentences


def sentences(number: int, seed: int) -> str:
    draw = random.Random(seed)
    words = ["a pipeline", "one device", "the batch", "waits for", "holds", "sends", "every stage", "its rows"]
    return "".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(number))


def write_short_config(folder: Path, *, microbatches: str = "microbatches = 4\n", evaluate: str = "") -> Path:
    """Some forty rows to train on, and to evaluate on more than eight batches, of which the last is of one row."""
    path = write_config(folder)
    (folder / "train.txt").write_text(sentences(66, seed=1))
    (folder / "validation.txt").write_text(sentences(VALIDATED, seed=2))
    written = path.read_text()
    for old, new in (
        (str(Path(__file__).with_name("test_training.py")), str(folder / "train.txt")),
        ("validation_fraction = 0.05", f'validation_files = ["{folder / "validation.txt"}"]'),
        ("[model]\n", "[model]\nself_check = false\n"),
        ("steps = 12\n", f"epochs = {EPOCHS}\n{evaluate}"),
        ("microbatches = 4\n", microbatches),
    ):
        assert old in written
        written = written.replace(old, new)
    path.write_text(written)
    prepare(load_config(path), say=lambda text: None)
    return path


def train_until_step(path: str, until: int | None) -> None:
    train_config_until(load_config(Path(path)), until)


def test_epochs_are_so_many_steps_and_resume_to_the_last_bit(tmp_path: Path) -> None:
    whole, parts = (write_short_config(tmp_path / name, evaluate="evaluate_every_steps = 3\n") for name in "ab")
    config = load_config(whole)
    rows = len(open_batches(config, open_data(config)).training_rows)
    steps = -(-14 * rows // 40)
    run_processes(train_until_step, 2, str(whole), None)
    with pytest.raises(StoppedError):
        run_processes(train_until_step, 2, str(parts), steps - 2)
    run_processes(train_until_step, 2, str(parts), None)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")

    lines = [line for line in logged(tmp_path / "a") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["epoch"] for line in lines] == [4 * line["step"] / rows for line in lines]
    assert lines[-2]["epoch"] < EPOCHS <= lines[-1]["epoch"]
    report = json.loads((tmp_path / "a" / "run" / "report.json").read_text())
    assert report["epoch"] == lines[-1]["epoch"]


@pytest.mark.parametrize("microbatches", ["microbatches = 4\n", "replicas = 2\nmicrobatches = 2\n"])
@pytest.mark.sampled(1)
def test_all_validation_data_counts_and_its_loss_is_that_of_transformers(tmp_path: Path, microbatches: str) -> None:
    """Its last batch is smaller than the number of microbatches; one of the replicas then has no row. With replicas
    each is of one device, which holds the whole vocabulary; the first one saves it."""
    path = write_short_config(tmp_path, microbatches=microbatches, evaluate='evaluation_batches = "none"\n')
    config = load_config(path)
    batches = open_batches(config, open_data(config))
    rows = torch.from_numpy(batches.validation.astype("int64"))
    assert len(rows) % config.pipeline.sequences_per_step == 1
    run_processes(train_until_step, 2, str(path), None)
    (validation,) = [line for line in logged(tmp_path) if "validation_loss" in line]
    assert validation["validation_tokens"] == rows[:, 1:].numel()
    export_checkpoint(tmp_path / "run", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        wanted = reference.loss_of(model, rows, rows).item()
    assert validation["validation_loss"] == pytest.approx(wanted, rel=1e-6)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["validation_loss"] == validation["validation_loss"]


@pytest.mark.slow
def test_a_time_box_may_end_epochs_early(tmp_path: Path) -> None:
    path = write_short_config(tmp_path)
    path.write_text(path.read_text().replace(f"epochs = {EPOCHS}\n", "epochs = 10000\nminutes = 0.02\n"))
    run_processes(train_until_step, 2, str(path), None)
    last = [line for line in logged(tmp_path) if "loss" in line][-1]
    assert 10 <= last["step"] < 2000
    run_processes(train_until_step, 2, str(path), None)
    assert [line for line in logged(tmp_path) if "loss" in line][-1] == last
