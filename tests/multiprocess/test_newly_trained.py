"""A checkpoint is loaded into a pipeline that trains more parameters: one process says once which ones begin anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_outcomes
from test_own_loop_checkpoints import RATE, batch, model

import evenpipe

FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight", "lm_head.weight")


def load_with_more_to_train(folder: Path, mode: str, options: dict[str, object]) -> bool:
    """Save with parameters on several processes frozen, load with all trained; return whether steps still work."""
    for trains_all in (False, True):
        pipeline = evenpipe.Pipeline(model(), vocabulary=mode, microbatches=2, self_check=False, **options)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(trains_all or name not in FROZEN)
        optimizer = torch.optim.AdamW([part for part in pipeline.parameters() if part.requires_grad], lr=RATE)
        if trains_all:
            pipeline.load_checkpoint(folder / "step-00000001", optimizer)
        pipeline.step(batch(int(trains_all)) if pipeline.feeds else None)
        optimizer.step()
        if not trains_all:
            pipeline.save_checkpoint(folder, 1, optimizer)
        pipeline.close()
    return True


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("vocab-2", {}),
        ("first-last", {"schedule": "zbv"}),
        ("vocab-1", {"replicas": 2, "data_parallel": "shard"}),
    ],
    ids=["vocabulary over devices", "split backward", "shards"],
)
@pytest.mark.sampled(2)
def test_newly_trained_parameters_are_named_once(mode: str, options: dict[str, object], tmp_path: Path) -> None:
    outcomes = run_outcomes(load_with_more_to_train, 2, tmp_path, mode, options)
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
    names = ", ".join(f"'{name}'" for name in sorted(FROZEN)[:2]) + f" and '{sorted(FROZEN)[2]}'"
    printed = "".join(outcome.printed for outcome in outcomes)
    assert printed.count("has no optimizer state of") == 1
    assert f"has no optimizer state of {names}, which are trained now: theirs begins anew" in printed
