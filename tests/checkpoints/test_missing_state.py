"""Parameters whose optimizer state begins anew when a checkpoint is loaded: one warning says which ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoint_run import METADATA, Run

from evenpipe.checkpoints import load, open_checkpoint, save

NAMES = {"embed": "model.embed_tokens.weight", "mlp": "model.layers.0.mlp.weight", "norm": "model.norm.weight"}


def trained(run: Run, names: str, optimizer: str = "AdamW") -> Run:
    """The run with an optimizer of these parameters only; all others are frozen."""
    for short, name in NAMES.items():
        run.shards[name].tensor.requires_grad_(short in names.split())
    parameters = [shard.tensor for shard in run.shards.values() if shard.tensor.requires_grad]
    run.optimizer = getattr(torch.optim, optimizer)(parameters, lr=0.01)
    return run


EMBED, MLP, NORM = (repr(name) for name in NAMES.values())

BEGINS = "which is trained now: its state begins"
CASES = [
    # trained before, optimizer, steps, trained now, what the warning says after the checkpoint's name
    ("embed mlp", "AdamW", 1, "embed mlp norm", f"no optimizer state of {NORM}, {BEGINS}"),
    ("norm", "AdamW", 1, "embed mlp norm", f"no optimizer state of {EMBED} and {MLP}, which are trained now: theirs b"),
    ("norm", "RMSprop", 3, "embed norm", f"no optimizer state of {EMBED}, {BEGINS}"),
    ("embed", "AdamW", 1, "mlp norm", f"no optimizer state of {MLP} and {NORM}, which are"),
    ("embed mlp norm", "AdamW", 1, "embed mlp norm", None),
    ("embed mlp norm", "AdamW", 1, "norm", None),
    ("norm", "AdamW", 0, "embed mlp norm", None),
    ("norm", "SGD", 2, "embed mlp norm", None),
]


def test_which_parameters_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (before, optimizer, steps, now, said) in enumerate(CASES):
        run = trained(Run(), before, optimizer)
        for step in range(steps):
            run.take_step(step)
        if optimizer == "SGD":  # keeps None where there is no momentum
            run.optimizer.state.clear()
        path = run.save(tmp_path / str(number), steps)
        other = trained(Run(seed=5), now, optimizer)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(open_checkpoint(path), other.shards, other.optimizer)
        loaded, state = run.tensors(), other.tensors()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items() if name in loaded)
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == (said is not None), warnings
        assert not warnings or warnings[0].startswith(f"the checkpoint '{path}' has {said}")


def test_a_parameter_that_stays_frozen_in_an_optimizer_of_all_is_not_named(tmp_path, caplog):
    runs = [Run(), Run(seed=5)]
    for run in runs:
        run.shards[NAMES["norm"]].tensor.requires_grad_(False)
    for name in ("embed", "mlp"):
        parameter = runs[0].shards[NAMES[name]].tensor
        parameter.grad = torch.ones_like(parameter)
    runs[0].optimizer.step()
    load(open_checkpoint(runs[0].save(tmp_path, 1)), runs[1].shards, runs[1].optimizer)
    assert caplog.records == []


def test_a_checkpoint_without_an_optimizer_names_the_first_and_counts_the_others(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("evenpipe.checkpoints.checkpoint.SHOWN_NAMES", 1)
    run = Run()
    path = save(tmp_path, 3, run.shards, None, METADATA)
    load(open_checkpoint(path), run.shards, run.optimizer)
    (record,) = caplog.records
    assert f"no optimizer state of {EMBED} and 2 more parameters, which are trained now" in record.getMessage()
    load(open_checkpoint(path), run.shards)
    assert len(caplog.records) == 1, "without an optimizer there is nothing to begin"
