"""Checkpointed and compiled layers on real processes: the gradients of transformers in one process.

"full" for every schedule is part of the matrix of schedules; here are the other choices, choices per layer, layers
inside of stages that have R, and compilation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial

import pytest
import reference
import torch
from harness import run_processes
from test_gradients import llama

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.runtime import device
from evenpipe.schedule import add_recompute, plan_order

LAYERS, TOKENS, VOCABULARY = 4, 6, 61
MIXED = ("selective", "none", "full", "selective")


@dataclass(frozen=True)
class Case:
    schedule: str
    checkpointing: str | tuple[str, ...] = "none"
    recompute: bool = False
    compiled: bool = False
    mode: str = "vocab-2"


@cache
def described():
    return describe(llama(VOCABULARY, False, torch.float64, LAYERS))


@cache
def expected(microbatches: int):
    data = reference.batches(VOCABULARY, 2 * microbatches, TOKENS, 1)
    return data[0], reference.train(copy.deepcopy(described().model), data)


def faults_of(cases: list[Case]) -> list[str]:
    """What is wrong, as the first process sees it. Every layer's forwards are counted where it runs: two per microbatch
    if it is checkpointed or its stage has R, and never three."""
    device.compile_layer = partial(device.compile_layer, backend="aot_eager")
    microbatches, found = 3, []
    for case in cases:
        (ids, labels), wanted = expected(microbatches)
        order = plan_order(case.schedule, 2, microbatches, case.mode)
        pipeline = Pipeline(
            described(),
            schedule=add_recompute(order) if case.recompute else order,
            vocabulary=case.mode,
            microbatches=microbatches,
            parameter_dtype=torch.float64,
            checkpointing=case.checkpointing,
            compile_layers=case.compiled,
            self_check=False,
        )
        counts = {} if case.compiled else count_forwards(pipeline)
        first = pipeline.device == 0
        result = pipeline.step(ids if first else None, labels if first else None)
        gradients = pipeline.full_gradients()
        choices = [case.checkpointing] * LAYERS if isinstance(case.checkpointing, str) else case.checkpointing
        for layer, count in counts.items():
            twice = case.recompute or choices[layer] != "none"
            if count[0] != microbatches * (2 if twice else 1):
                found.append(f"{case}: layer {layer} ran {count[0]} times")
        if first:
            error, worst = reference.worst(gradients, wanted.gradients)
            if not max(error, abs(result.loss / wanted.losses[0] - 1)) <= 1e-10:
                found.append(f"{case}: loss {result.loss}, {worst} off by {error:.1e}")
        else:
            float(result.loss)
        pipeline.close()
    return found


def count_forwards(pipeline: Pipeline) -> dict[int, list[int]]:
    """Layer -> forwards, seen by a part inside of what is checkpointed."""
    counts: dict[int, list[int]] = {}
    for stage in pipeline._held.stages.values():
        for index in range(stage.first, stage.last):
            count = counts[index] = [0]
            part = stage.get_submodule(f"model.layers.{index}.input_layernorm")
            part.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
    return counts


CASES = [
    Case("1f1b", "selective"),
    Case("interleaved", MIXED, mode="vocab-1"),
    Case("zb-h1", "selective", mode="first-last"),
    Case("zbv", MIXED),
    Case("v-half", "full"),
    Case("zb-h1", "full", recompute=True),
    Case("zbv", MIXED, recompute=True),
]
COMPILED = [
    Case("zbv", compiled=True),
    Case("1f1b", "selective", compiled=True, mode="first-last"),
    Case("zb-h1", "full", compiled=True, mode="vocab-1"),
    Case("zbv", "full", recompute=True, compiled=True),
]


@pytest.mark.parametrize("cases", [CASES, COMPILED], ids=["checkpointed", "compiled"])
def test_gradients_of_one_process(cases: list[Case], sample) -> None:
    count = 1 if cases is COMPILED else 2  # torch takes seconds for each
    found = run_processes(faults_of, 2, sample(cases, count))
    assert not any(found), "\n".join(found[0] + found[1])
