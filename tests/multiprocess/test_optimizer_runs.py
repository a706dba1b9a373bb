"""Runs of the trainer with other optimizers: stopped and taken up, with one of the user's own, and with another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from training_runs import STEPS, curve, prepared, start, steps_logged, train, write_config

from evenpipe.errors import InputError
from evenpipe.train.config_file import load_config
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
    changes |= {"pipeline.replicas": 2, "pipeline.data_parallel": "shard", "model.config.attention_dropout": 0.3}
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
