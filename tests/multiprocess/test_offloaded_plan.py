"""A plan for a model of 70B parameters on 16 devices, with activations on the host: a shrunken copy of it runs.

The order is the plan's own, on 16 processes; layers are as many, and stand where the plan has them. The judge is
transformers in one process.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import reference
import torch
from harness import run_processes
from test_gradients import llama

from evenpipe import Pipeline
from evenpipe.costs.hardware import KNOWN
from evenpipe.model import describe
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import problem_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Kind, Order, even_split

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "llama-3.1-70b.json"
DEVICES, LAYERS, MICROBATCHES = 16, 80, 32
VOCABULARY, TOKENS = 67, 32


def planned() -> tuple[Order, tuple[int, ...]]:
    """The order, and the layers of its stages: V-Half, vocab-2, and all copies that cost no time."""
    given = problem_of(describe(MODEL), KNOWN["H200"], gpus=DEVICES, sequence=4096, sequences_per_step=256)
    recipe = Recipe.of(
        pp=DEVICES,
        microbatches=256,
        sequence_length=4096,
        schedule="v-half",
        layers_per_stage=even_split(LAYERS, 2 * DEVICES),
    )
    plan = evaluate(given, Configuration.of(given, recipe, open=("checkpointing", "offload")))
    assert plan.fits and plan.configuration.offload == "free"
    return given.programs.of(plan.configuration.recipe, MICROBATCHES)[0], plan.configuration.layers_per_stage


@cache
def described():
    return describe(llama(VOCABULARY, False, torch.float64, LAYERS))


def step(order: Order, layers_per_stage: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """Loss, gradients, and how many activations this device moved, and bytes of them at one moment."""
    pipeline = Pipeline(
        described(),
        schedule=order,
        layers_per_stage=layers_per_stage,
        parameter_dtype=torch.float64,
        self_check=False,
    )
    ids, labels = reference.batches(VOCABULARY, MICROBATCHES, TOKENS, 1)[0]
    loss = pipeline.step(ids, labels).loss
    gradients = pipeline.full_gradients()
    assert pipeline._activations is not None
    host, left = pipeline._activations.pool.most_used, pipeline._activations.pool.used
    assert left == 0
    pipeline.close()
    moved = sum(item is not None and item.kind is Kind.O for item in order.rows[pipeline.device])
    return loss, gradients, moved, host


@pytest.mark.slow
def test_a_shrunken_copy_of_a_plan_gives_the_gradients_of_one_process() -> None:
    order, layers_per_stage = planned()
    results = run_processes(step, DEVICES, order, layers_per_stage)
    moved = [(number, host) for _, _, number, host in results]
    assert all(number > MICROBATCHES / 2 and host > 0 for number, host in moved), moved
    wanted = reference.train(copy.deepcopy(described().model), reference.batches(VOCABULARY, MICROBATCHES, TOKENS, 1))
    loss, gradients, _, _ = results[0]
    assert abs(loss / wanted.losses[0] - 1) <= 1e-10
    error, name = reference.worst(gradients, wanted.gradients)
    assert error <= 1e-10, name
