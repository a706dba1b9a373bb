"""Checkpointed layers run their forward twice and never three times, also in stages that have R.

Their gradients are compared by tests/fuzz.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import reference
from harness import check_cases
from small_runs import Case, opened

from evenpipe import Pipeline

MIXED = ("selective", "none", "full", "selective")
TWO = Case("llama", devices=2)
CASES = [
    replace(TWO, checkpointing="selective"),
    replace(TWO, schedule="interleaved", checkpointing=MIXED, mode="vocab-1"),
    replace(TWO, schedule="zb-h1", checkpointing="selective", mode="first-last"),
    replace(TWO, schedule="v-half", checkpointing="full"),
    replace(TWO, schedule="zb-h1", checkpointing="full", repeats=True),
    replace(TWO, schedule="zbv", checkpointing=MIXED, repeats=True),
]


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
        with contextlib.closing(opened(case)) as pipeline:
            counts = count_forwards(pipeline)
            pipeline.step(*reference.batches(61, 2 * case.microbatches, 6, 1)[0])
        choices = [case.checkpointing] * 4 if isinstance(case.checkpointing, str) else case.checkpointing
        for layer, (count,) in counts.items():
            if count != case.microbatches * (2 if case.repeats or choices[layer] != "none" else 1):
                faults.append(f"{case}: layer {layer} ran {count} times")
    return faults


def test_checkpointed_layers_run_twice_and_others_once(sample) -> None:
    check_cases(wrong_counts, sample(CASES, 3))
