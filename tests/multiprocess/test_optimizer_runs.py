"""Runs of the trainer with other optimizers: stopped and taken up, with one of the user's own, and with another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import run_processes
from test_training import STEPS, StoppedError, curve, train_until, write_config

from evenpipe.errors import InputError
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare
from evenpipe.train.learning_rates import learning_rate

MINE = """
import torch

def make(named_parameters, lr, factor):
    parameters = dict(named_parameters)
    return torch.optim.Adam([
        {"params": [one for one in parameters.values() if one.dim() > 1]},
        {"params": [one for one in parameters.values() if one.dim() < 2], "lr": factor * lr},
    ], lr=lr)
"""
OPTIMIZERS = {
    "muon": 'name = "muon"\nschedule = "warmup-stable-decay"\ndecay_steps = 4',
    "own": 'name = "mine:make"\noptions = {factor = 0.1}\nschedule = "linear"',
}
LINE = "warmup_steps = 3"


def run_in(folder: str, path: str, until: int) -> None:
    """The trainer, started in a folder."""
    os.chdir(folder)
    train_until(path, 2, "vocab-2", until)


def run_to(path: Path, until: int) -> None:
    arguments = (str(path.parent), str(path), until)
    if until == STEPS:
        run_processes(run_in, 2, *arguments)
    else:
        with pytest.raises(StoppedError):
            run_processes(run_in, 2, *arguments)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["muon", "own"])
def test_a_run_with_another_optimizer_is_resumed_to_the_last_bit(tmp_path: Path, optimizer: str) -> None:
    curves = []
    for name, stops in (("whole", (STEPS,)), ("parts", (6, STEPS))):
        path = write_config(tmp_path / name)
        (path.parent / "mine.py").write_text(MINE)
        text = path.read_text().replace(LINE, f"{LINE}\n{OPTIMIZERS[optimizer]}")
        path.write_text(text.replace("[pipeline]", '[pipeline]\nreplicas = 2\ndata_parallel = "shard"'))
        prepare(load_config(path), say=lambda text: None)
        for until in stops:
            run_to(path, until)
        curves.append(curve(tmp_path / name))
    assert curves[0] == curves[1]
    config = load_config(path).optimizer
    rates = [line[3] for line in curves[0] if len(line) == 4]
    assert rates == [learning_rate(step, STEPS, config) for step in range(STEPS)]
    path.write_text(path.read_text().replace(OPTIMIZERS[optimizer], 'name = "sgd"').replace("steps = 12", "steps = 13"))
    with pytest.raises(InputError, match=r"optimizer: it is SGD, but the checkpoint .* was saved with (Muon|Adam);"):
        run_processes(run_in, 2, str(path.parent), str(path), STEPS)
