"""Every promised family on two devices, multipliers and soft-caps away from their defaults, trained three steps."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from families import NAMED, tiny_config, whole_model
from harness import run_processes
from test_gradients import MODES

from evenpipe import Pipeline
from evenpipe.model import describe

NORMS_IN_FP32 = {"gemma2", "gemma3_text", "cohere2"}
"""These compute their norms in fp32 whatever their dtype, so sums in another order differ in fp32."""

WITHOUT_BIAS = {"smollm3", "cohere2"}
"""Some of their layers have no rotary embedding: a bias of the keys then adds the same to every score of a query, its
gradient is zero but for rounding, and AdamW makes that rounding a full step. tests/model compares these gradients."""

STEPS = 3


def family_on_two_devices(name: str, tied: bool, mode: str) -> None:
    one_step, three_steps = (1e-6, 1e-5) if name in NORMS_IN_FP32 else (1e-10, 1e-8)
    changes = {"attention_bias": False} if name in WITHOUT_BIAS else {}
    description = describe(whole_model(tiny_config(name, tied=tied, **changes)))
    data = reference.batches(description.vocabulary_size, 4, 10, STEPS)
    wanted = reference.train(copy.deepcopy(description.model), data)
    pipeline = Pipeline(description, vocabulary=mode, microbatches=2, parameter_dtype=torch.float64, self_check=False)
    optimizer = reference.adamw(list(pipeline.parameters()))
    for number, batch in enumerate(data):
        pipeline.zero_grad()
        loss = pipeline.step(*batch).loss
        if number == 0:
            gradients = pipeline.full_gradients()
            assert loss == pytest.approx(wanted.losses[0], rel=one_step)
        optimizer.step()
    weights = pipeline.full_state_dict()
    pipeline.close()
    if pipeline.device == 0:
        for found, expected, tolerance in (
            (gradients, wanted.gradients, one_step),
            (weights, wanted.weights, three_steps),
        ):
            error, parameter = reference.worst(found, expected)
            assert error <= tolerance, f"{parameter} {error:.1e}"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*NAMED, "gpt2", "phi"])
def test_a_family_trains_as_in_one_process(name: str, tied: bool, mode: str) -> None:
    run_processes(family_on_two_devices, 2, name, tied, mode)


def checked(names: list[str]) -> None:
    for name in names:
        config = tiny_config(name)
        Pipeline(config, vocabulary="vocab-2", microbatches=1).close()


def test_the_self_check_passes_them() -> None:
    run_processes(checked, 2, list(NAMED))
