"""Candidates for the layers of each stage: against all splits of a small model, each evaluated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement

import pytest
from planned_problems import description_of

from evenpipe.costs.hardware import KNOWN
from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import head_layers
from evenpipe.plan.evaluation import Evaluation, evaluate
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.splits import Split, split_that_fits, splits
from evenpipe.recipe.recipe import Recipe
from evenpipe.sizes import GIB

DEVICES, LAYERS = 4, 10
FULL, ENOUGH = 11, 80
"""GiB with which 1F1B recomputes in every even split, and those with which nothing does."""


@cache
def problem(memory: int, vocabulary: int = 128256, kernels: str = "fused") -> Problem:
    return problem_of(
        description_of("small", num_hidden_layers=LAYERS, vocab_size=vocabulary),
        KNOWN["A100-80G"],
        gpus=DEVICES,
        sequence=4096,
        sequences_per_step=64,
        memory_bytes=memory * GIB,
        kernels=kernels,
    )


def every_split() -> list[Split]:
    cuts = combinations_with_replacement(range(LAYERS + 1), DEVICES - 1)
    return [tuple(stop - start for start, stop in zip((0, *cut), (*cut, LAYERS), strict=True)) for cut in cuts]


def recipe(given: Problem, schedule: str, mode: str) -> Recipe:
    return Recipe.of(pp=DEVICES, microbatches=16, sequence_length=given.sequence, schedule=schedule, vocabulary=mode)


def candidates(given: Problem, schedule: str, mode: str) -> tuple[Split, ...]:
    layout = recipe(given, schedule, mode)
    shape = given.programs.shape(schedule, (), DEVICES)
    assert shape is not None
    return splits(given, layout, shape, mode, head_layers(given, layout))


def evaluated(given: Problem, schedule: str, mode: str, split: Split) -> Evaluation:
    one = replace(recipe(given, schedule, mode), layers_per_stage=split)
    return evaluate(given, Configuration.of(given, one, open=("activation_checkpointing",)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [FULL, ENOUGH])
def test_the_best_of_all_splits_is_hardly_faster(memory: int) -> None:
    """Beside the passes, a step has the optimizer's, which the split changes a little."""
    given = problem(memory)
    best, own = (
        min(evaluated(given, "1f1b", "redistribute", split).seconds for split in among if max(split) <= 5)
        for among in (every_split(), candidates(given, "1f1b", "redistribute"))
    )
    assert best <= own <= 1.005 * best


def test_with_room_nobody_thinks_of_memory() -> None:
    given = problem(ENOUGH, vocabulary=32000)
    assert candidates(given, "1f1b", "first-last") == ((3, 3, 2, 2), (2, 2, 3, 3))
    assert candidates(given, "1f1b", "vocab-2") == ((3, 3, 2, 2), (2, 2, 3, 3))
    for split in candidates(given, "1f1b", "redistribute"):
        assert sum(split) == LAYERS and split[-1] == min(split)


def test_without_room_layers_go_where_little_is_in_flight() -> None:
    given = problem(FULL)
    first, *others = candidates(given, "1f1b", "redistribute")
    assert first[0] < min(split[0] for split in others)


def test_layers_beside_shards_make_room_too() -> None:
    """Both even splits have to recompute more."""
    given = problem(16, vocabulary=256000)
    moved, *others = candidates(given, "1f1b", "vocab-2")
    assert others == [(3, 3, 2, 2), (2, 2, 3, 3)]
    moved_seconds, *seconds = (evaluated(given, "1f1b", "vocab-2", split).seconds for split in (moved, *others))
    assert moved_seconds < 0.995 * min(seconds)


# schedule, recomputation of all layers, GiB of a GPU, the split that a run takes because that by time does not fit
SLOW = pytest.mark.slow
RUNS = [
    ("1f1b", "none", 20, None),
    pytest.param("1f1b", "none", 14, (2, 4, 4, 0), marks=SLOW),
    ("1f1b", "none", 9, None),
    ("1f1b", "selective", 11, (1, 4, 4, 1)),
    ("zb-h1", "none", 14, (2, 4, 4, 0)),
    ("v-half", "none", 9, None),
]


@pytest.mark.parametrize(("schedule", "policy", "memory", "expected"), RUNS)
@pytest.mark.sampled(1)
def test_a_run_that_does_not_fit_takes_another_split(
    schedule: str, policy: str, memory: int, expected: Split | None
) -> None:
    """The fastest of all that fit, with the recomputation of the run."""
    given = problem(memory, kernels="transformers")
    run = replace(recipe(given, schedule, "redistribute"), activation_checkpointing=policy)
    assert split_that_fits(given, run) == expected
    if expected is not None:
        usual = Configuration.of(given, run)
        every = [split for split in every_split() if max(split) <= 4]
        found = {split: evaluate(given, usual.decided(layers_per_stage=split)) for split in every}
        best = min(one.seconds for one in found.values() if one.fits)
        assert found[expected].fits and found[expected].seconds == best


def test_only_a_choice_of_splits_is_made() -> None:
    given = problem(14, kernels="transformers")
    run = recipe(given, "1f1b", "redistribute")
    for other in (
        replace(run, vocabulary="vocab-2"),
        replace(run, layers_per_stage=(3, 3, 2, 2)),
        replace(run, batch=replace(run.batch, slices="auto")),
    ):
        assert split_that_fits(given, other) is None
