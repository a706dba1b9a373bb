"""Programs that plans are timed with: those of the runtime, and two short steps in place of a long one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from planned_problems import configuration, most, problem

from evenpipe.costs.timed_model import OURS, arranging_model
from evenpipe.model import RowWork, slice_ends
from evenpipe.plan.configuration import Configuration, costs_of
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import evaluate, least_work, work_of
from evenpipe.plan.problem import Problem
from evenpipe.plan.programs import extended, short_steps
from evenpipe.plan.space import Space
from evenpipe.recipe.layout import Layout
from evenpipe.schedule import MODES, Program
from evenpipe.schedule.transforms.offload import offloaded
from evenpipe.simulate import makespan, simulate
from evenpipe.train.planned_config import _pipeline

Sample = Callable[..., list[Any]]
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min")
FIXED = ("first-last", "redistribute")
"""Modes that add no passes."""


@pytest.fixture(scope="module")
def small() -> Problem:
    return problem(memory=26)


@pytest.fixture(scope="module")
def long() -> Problem:
    """On a card where attention on pieces of sequences is as fast as on whole ones."""
    return problem(sequence=32768, sequences_per_step=8, kernels="transformers")


@pytest.fixture(scope="module")
def roomy() -> Problem:
    """Long sequences: copies take less than half of what computes beside them."""
    return problem(gpus=4, memory=1000, sequence=65536)


def program_of(given: Problem, one: Configuration, microbatches: int) -> Program:
    return given.programs.of(one.recipe, microbatches)[1]


def of_the_runtime(given: Problem, one: Configuration) -> Program:
    """Arranged as a run arranges it, where the problem is one of our own kernels."""
    arranging, model = given.arranging, given.description
    if given.implementation == OURS:
        arranging = arranging_model(model, one.recipe, given.hardware, given.dtype)
    return Layout.of(one.recipe, arranging, model.vocabulary_size, model.head_rows, tied=model.tied).program


def test_programs_are_those_of_the_runtime(small: Problem, long: Problem, roomy: Problem, sample: Sample) -> None:
    cases: list[tuple[Problem, Configuration]] = []
    for schedule, mode in sample(product(["1f1b", "zbv", "interleaved"], MODES), 2):
        cases.append((small, configuration(small, schedule, mode, 9)))
    modes = ["first-last", "vocab-1", "vocab-2", "interlaced"]
    for schedule, mode in sample(product(["1f1b", "zbv", "interleaved"], modes), 2):
        cases.append((long, configuration(long, schedule, mode, 8, slices=4)))
    schedules = ["1f1b", "interleaved", "zb-h1", "zbv", "v-half", "po-h"]
    for schedule, mode, offload in sample(product(schedules, MODES[:-1], ["free", "all", "scheduled"]), 3):
        one = evaluate(roomy, configuration(roomy, schedule, mode, 9, offload=offload)).configuration
        cases.append((roomy, one))
        assert bool(offloaded(of_the_runtime(roomy, one).order)) == (offload != "scheduled" or schedule == "po-h")
    for given, one in cases:
        microbatches = one.recipe.microbatches
        assert program_of(given, one, microbatches) == of_the_runtime(given, one), one.name


def test_two_short_steps_say_how_long_a_long_one_takes(small: Problem, long: Problem, sample: Sample) -> None:
    whole = [
        (small, case, 1, 80) for case in sample(product(SCHEDULES, (*FIXED, "vocab-1", "vocab-2", "interlaced")), 4)
    ]
    cut = [("1f1b", "first-last"), ("1f1b", "vocab-2"), ("zbv", "vocab-2")]
    for given, (schedule, mode), slices, length in [
        *whole,
        *((long, case, slices, 60) for case, slices in sample(product(cut, (2, 4)), 1)),
    ]:
        one = configuration(given, schedule, mode, length, slices=slices)
        sizes = short_steps(4, length, planned=mode not in FIXED, slices=slices)
        if slices == 1:
            assert sizes in ((8, 20), (12, 60))
        else:
            assert sizes[1] - sizes[0] == (3 if mode in FIXED else 12) * 4 // slices
        costs, program = costs_of(given, one), program_of(given, one, length)
        exact = simulate(program, costs).makespan
        assert makespan(program, costs) == exact
        short = [simulate(program_of(given, one, size), costs).makespan for size in sizes]
        assert extended(short, sizes, length, max(work_of(program, costs))) == pytest.approx(exact, rel=0.005), one.name


def test_short_steps_with_copies_say_how_long_a_long_one_takes_and_what_it_holds(
    roomy: Problem, sample: Sample
) -> None:
    schedules = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "po-h")
    for schedule, mode in sample(product(schedules, ("first-last", "vocab-2")), 1):
        found = evaluate(roomy, configuration(roomy, schedule, mode, 80, offload="free"))
        one = found.configuration
        assert one.steps == (12, 60)
        exact = simulate(program_of(roomy, one, 80), costs_of(roomy, one)).makespan
        assert found.pipeline_seconds == pytest.approx(exact, rel=0.005), one.name
        fewer = one.decided(batch=replace(one.recipe.batch, microbatches=one.steps[0]))
        assert most(evaluate(roomy, fewer)) == most(found), one.name


def test_the_step_of_the_best_plan_is_not_extrapolated() -> None:
    """With interleaved schedules and a remainder, devices use up slack for many groups before one waits."""
    given = problem(gpus=4, sequences_per_step=203)
    space = Space(pp=(4,), microbatch_sizes=(1,), schedules=("interleaved",), stages_per_device=(2,))
    found = search_configurations(given, replace(space, vocabularies=("redistribute", "vocab-2")), workers=1)
    assert found.best is not None
    one = found.best.configuration
    assert one.steps[-1] < one.recipe.microbatches == 203
    assert found.best.pipeline_seconds == makespan(program_of(given, one, 203), costs_of(given, one))
    assert found.best.seconds == min(plan.seconds for plan in found.plans)


# --- slices -----------------------------------------------------------------------------------------------------------


def test_slices_are_timed_with_the_cut_points_of_the_runtime(long: Problem) -> None:
    from evenpipe.costs.timed_model import ends_of

    one = configuration(long, "1f1b", "first-last", 8, slices=4)
    assert ends_of(long, one.recipe) == slice_ends(RowWork.of(long.description), long.sequence, 4, 1)
    costs, whole = costs_of(long, one), costs_of(long, configuration(long, "1f1b", "first-last", 8))
    assert set(costs.slices) >= {"F", "B", "I", "W", "tokens"}
    for name in "FBW":
        times, of_all = getattr(costs, name), getattr(whole, name)
        again = 1.3 if name == "B" else 1.0  # attention of pieces runs again in its backward
        assert of_all[1] * 0.999 < 4 * times[1] < of_all[1] * again * 1.2, "products of fewer tokens are slower"
    forwards = [part.F[1] for part in costs.by_slice(4)]  # type: ignore[index]
    assert max(forwards) / min(forwards) < 1.1, "slices take equal time, not equal length"
    assert max(costs.slices["tokens"]) / min(costs.slices["tokens"]) > 1.3
    for case in (one, configuration(long, "1f1b", "vocab-2", 8, slices=4)):
        work = work_of(program_of(long, case, case.steps[0]), costs_of(long, case))
        assert work == pytest.approx(least_work(long, case)), case.name


def test_written_plans_say_how_sequences_are_cut(long: Problem) -> None:
    one = configuration(long, "1f1b", "vocab-2", 8, slices=4)
    assert _pipeline(long, one)["slices"] == 4 and "cp" not in _pipeline(long, one)
    shared = one.recipe.parallelism.__class__(cp=2, pp=4, context_exchange="heads")
    found = _pipeline(long, replace(one, recipe=replace(one.recipe, parallelism=shared)))
    assert (found["processes"], found["cp"], found["context_exchange"]) == (8, 2, "heads")
    assert one.name.endswith("1 x 8 slices 4")
