"""Families that run in fp64 also run in bf16, the default on a GPU: stages with fresh weights, forward and backward."""

from __future__ import annotations

import json

import families_page
import pytest
import torch
from family_configs import Configuration

from evenpipe.errors import InputError
from evenpipe.model import build_stage, check_compute_dtype, describe, initialize
from evenpipe.parallel.parameters import StageParameters

RESULTS = json.loads(families_page.RESULTS.read_text(encoding="utf-8"))["configurations"]
EQUAL = [Configuration(row["model_type"], row["variant"]) for row in RESULTS if row["word"] == "equal"]
FP32_RESIDUALS = {"mamba", "mamba2", "falcon_mamba"}
"""Their layers return fp32 unless `residual_in_fp32` is off."""
FEW = [Configuration(name) for name in ("bert", "falcon_h1", "gemma4", "mamba", "minimax", "openai-gpt", "opt")]


def runs_in_bf16(configuration: Configuration) -> None:
    description = describe(configuration.build())
    if configuration.model_type in FP32_RESIDUALS and configuration.variant != "residual in its own dtype":
        with pytest.raises(InputError, match="set residual_in_fp32 to false in the model's config"):
            check_compute_dtype(description, torch.bfloat16)
        return
    check_compute_dtype(description, torch.bfloat16)
    hidden = torch.randn(2, 6, description.hidden_size, dtype=torch.bfloat16)
    positions = description.positions_of(torch.full((2, 6), 5)) if description.counts_positions else None
    for first, last in ((0, 2), (2, description.layers)):
        is_last = last == description.layers
        stage = build_stage(
            description, first, last, is_first=first == 0, is_last=is_last, compute_dtype=torch.bfloat16
        )
        initialize(stage, description, seed=0)
        StageParameters(stage, torch.bfloat16).refresh()
        received = hidden.detach().requires_grad_()
        hidden = stage(received, positions)
        hidden.float().square().sum().backward()
        assert hidden.isfinite().all() and received.grad.isfinite().all(), f"{configuration}: layers {first} to {last}"


@pytest.mark.parametrize("configuration", FEW, ids=str)
def test_a_few_families_run_in_bf16(configuration: Configuration) -> None:
    runs_in_bf16(configuration)


@pytest.mark.slow
def test_every_family_that_is_equal_runs_in_bf16() -> None:
    for configuration in EQUAL:
        runs_in_bf16(configuration)
