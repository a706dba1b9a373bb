"""Checkpointed layers run their forward twice and never three times, also in stages that have R; and compiled layers
give the gradients of transformers in one process.

Gradients of layers that are not compiled are compared by tests/fuzz.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial

import pytest
import reference
import torch
from harness import run_processes
from small_llama import llama

from evenpipe import Pipeline
from evenpipe.model import describe
from evenpipe.runtime import device
from evenpipe.schedule import add_recompute, plan_order

LAYERS, TOKENS, VOCABULARY, MICROBATCHES = 4, 6, 61, 3
MIXED = ("selective", "none", "full", "selective")


@dataclass(frozen=True)
class Case:
    schedule: str
    checkpointing: str | tuple[str, ...] = "none"
    recompute: bool = False
    mode: str = "vocab-2"

    def open(self, **options) -> Pipeline:
        order = plan_order(self.schedule, 2, MICROBATCHES, self.mode)
        return Pipeline(
            described(),
            schedule=add_recompute(order) if self.recompute else order,
            vocabulary=self.mode,
            microbatches=MICROBATCHES,
            parameter_dtype=torch.float64,
            checkpointing=self.checkpointing,
            self_check=False,
            **options,
        )


@cache
def described():
    return describe(llama(VOCABULARY, False, torch.float64, LAYERS))


def batch():
    return reference.batches(VOCABULARY, 2 * MICROBATCHES, TOKENS, 1)[0]


def count_forwards(pipeline: Pipeline) -> dict[int, list[int]]:
    """Layer -> forwards, seen by a part inside of what is checkpointed."""
    counts: dict[int, list[int]] = {}
    for stage in pipeline._held.stages.values():
        for index in range(stage.first, stage.last):
            count = counts[index] = [0]
            part = stage.get_submodule(f"model.layers.{index}.input_layernorm")
            part.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
    return counts


def wrong_counts(cases: list[Case]) -> list[str]:
    faults = []
    for case in cases:
        pipeline = case.open()
        counts = count_forwards(pipeline)
        pipeline.step(*batch())
        pipeline.close()
        choices = [case.checkpointing] * LAYERS if isinstance(case.checkpointing, str) else case.checkpointing
        for layer, (count,) in counts.items():
            if count != MICROBATCHES * (2 if case.recompute or choices[layer] != "none" else 1):
                faults.append(f"{case}: layer {layer} ran {count} times")
    return faults


CASES = [
    Case("1f1b", "selective"),
    Case("interleaved", MIXED, mode="vocab-1"),
    Case("zb-h1", "selective", mode="first-last"),
    Case("zbv", MIXED),
    Case("v-half", "full"),
    Case("zb-h1", "full", recompute=True),
    Case("zbv", MIXED, recompute=True),
]


def test_checkpointed_layers_run_twice_and_others_once(sample) -> None:
    faults = run_processes(wrong_counts, 2, sample(CASES, 4))
    assert not any(faults), faults


def wrong_gradients_of_compiled_layers(cases: list[Case]) -> list[str]:
    device.compile_layer = partial(device.compile_layer, backend="aot_eager")
    expected = reference.train(copy.deepcopy(described().model), [batch()])
    faults = []
    for case in cases:
        pipeline = case.open(compile_layers=True)
        loss = pipeline.step(*batch()).loss
        gradients = pipeline.full_gradients()
        pipeline.close()
        if gradients:
            error, name = reference.worst(gradients, expected.gradients)
            if not max(error, abs(loss / expected.losses[0] - 1)) <= 1e-10:
                faults.append(f"{case}: loss {loss}, {name} off by {error:.1e}")
    return faults


COMPILED = [
    Case("zbv"),
    Case("1f1b", "selective", mode="first-last"),
    Case("zb-h1", "full", mode="vocab-1"),
    Case("zbv", "full", recompute=True),
]


@pytest.mark.slow
def test_compiled_layers_have_the_gradients_of_one_process() -> None:
    """Torch takes seconds for each."""
    faults = run_processes(wrong_gradients_of_compiled_layers, 2, COMPILED)
    assert not any(faults), faults
