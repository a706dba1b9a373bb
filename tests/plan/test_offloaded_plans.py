"""Plans with activations on the host: they fit where they would not, cost no time, and say what a run has to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import planned_problems
import pytest
from planned_problems import host, most, needed

from evenpipe.plan.configuration import Configuration
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import Problem
from evenpipe.plan.ranking import Ranking
from evenpipe.plan.space import Space
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.sizes import GIB
from evenpipe.train.planned_config import planned_tables

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "po-h")
BASE = {
    "model": {"architecture": "llama", "config": {"num_hidden_layers": 16}},
    "data": {"corpus": "python-standard-library:json"},
    "tokenizer": {"vocabulary_size": 300},
}
"""The tables of a configuration that a plan goes into."""


@cache
def problem(memory: float = 79, sequence: int = 65536) -> Problem:
    """Long sequences: copies take less than half of what computes beside them."""
    return planned_problems.problem(gpus=4, memory=memory, sequence=sequence)


@pytest.fixture
def roomy() -> Problem:
    return problem(1000)


def configuration(
    schedule: str, mode: str, microbatches: int = 40, *, offload: str = "free", **others: Any
) -> Configuration:
    return planned_problems.configuration(problem(1000), schedule, mode, microbatches, offload=offload, **others)


def test_a_stage_may_have_no_layers(roomy: Problem) -> None:
    one = configuration("interleaved", "redistribute", 9)
    assert len(one.layers_per_stage) == 8 and sum(one.layers_per_stage) == 16
    emptied = replace(one, recipe=replace(one.recipe, layers_per_stage=(3, 3, 3, 0, 3, 2, 1, 1)))
    found = evaluate(roomy, emptied)
    assert found.configuration.layers_per_stage[3] == 0
    assert len(found.configuration.copy_seconds) == 8


def test_what_is_free_lowers_memory_and_costs_no_time(roomy: Problem, sample: Callable[..., list[Any]]) -> None:
    for schedule, mode in sample(product(SCHEDULES, ("first-last", "vocab-2")), 2):
        kept = evaluate(roomy, configuration(schedule, mode, offload="none"))
        free = evaluate(roomy, configuration(schedule, mode))
        peaks = list(zip(*([use.peak_bytes for use in plan.devices] for plan in (free, kept)), strict=True))
        assert all(less <= 1.01 * more for less, more in peaks) and peaks[0][0] < 0.9 * peaks[0][1]
        assert host(free) > 0 == host(kept)
        assert free.seconds <= 1.02 * kept.seconds
        assert free.configuration.copy_seconds and max(free.configuration.copy_time) < 0.5


def test_copies_are_planned_where_memory_is_short_and_nowhere_else(roomy: Problem) -> None:
    one = configuration("1f1b", "vocab-2", open=("activation_checkpointing",), offload="least")
    plenty = evaluate(roomy, one)
    assert plenty.configuration.offload == "scheduled" and not host(plenty) and not plenty.without_recomputation
    free = evaluate(roomy, one.with_offload("free"))
    between = (most(free) + most(plenty)) / 2 / GIB
    short = evaluate(problem(between * 1.05), one)
    assert short.fits and short.configuration.offload == "free" and host(short) > 0
    assert set(short.configuration.checkpointing) == {"none"}, "copies come before recomputation"
    assert short.seconds <= 1.02 * plenty.seconds
    assert max(use.peak_bytes for use in short.without_recomputation) == most(plenty)
    without = evaluate(problem(between * 1.05), one.with_offload("scheduled"))
    assert without.fits and set(without.configuration.checkpointing) != {"none"}
    assert without.seconds > short.seconds


def test_a_table_says_what_is_on_the_host_and_why(roomy: Problem) -> None:
    one = configuration("1f1b", "vocab-2", open=("activation_checkpointing",), offload="least")
    between = (most(evaluate(roomy, one.with_offload("free"))) + most(evaluate(roomy, one))) / 2 / GIB * 1.05
    space = Space(
        pp=(4,), microbatch_sizes=(1,), schedules=("1f1b",), vocabularies=("vocab-2",), offload=("least", "scheduled")
    )
    text = Ranking(search_configurations(problem(between), space, workers=1), 5).text(explain=True)
    assert "vocab-2 offload free 1 x 64" in text and " of activations on the host per device" in text
    assert "cheapest fixes: recompute (" in text and "%, offload free +" in text
    alone = replace(space, offload=("least",))
    text = Ranking(search_configurations(problem(between), alone, workers=1), 5).text(explain=True)
    assert "cheapest fixes: activations to the host +" in text


def test_a_plan_says_what_the_run_has_to_know(roomy: Problem) -> None:
    plan = evaluate(roomy, configuration("1f1b", "vocab-2", 9))
    tables = planned_tables(
        roomy, plan, {**BASE, "offload": {"host_memory": "64GiB", "layers": ["keep"]}}, "planned", "H100-80G"
    )
    time, *others = plan.configuration.copy_time
    assert set(others) == {time}
    assert tables["offload"] == {"host_memory": "64GiB", "activations": "free", "copy_time": time}
    other = replace(plan, configuration=plan.configuration.with_offload("free", copy_time=(0.3, 0.3, 0.3, 0.4)))
    assert planned_tables(roomy, other, BASE, "planned", "H100-80G")["offload"]["copy_time"] == [0.3, 0.3, 0.3, 0.4]
    kept = evaluate(roomy, configuration("1f1b", "vocab-2", 9, offload="none"))
    assert "offload" not in planned_tables(roomy, kept, BASE, "planned", "H100-80G")
    assert planned_tables(roomy, kept, {**BASE, "offload": {"activations": "all"}}, "planned", "H100-80G")[
        "offload"
    ] == {"activations": "none"}


@pytest.mark.slow
def test_seventy_billion_parameters_on_sixteen_devices() -> None:
    """V-Half, the vocabulary over all devices and copies that cost no time: of what is as fast, the least memory."""
    given = planned_problems.problem(
        "70B", gpus=16, memory=1000, hardware="H200", sequences_per_step=256, kernels="transformers"
    )
    space = Space(
        pp=(16,),
        microbatch_sizes=(1,),
        schedules=("1f1b", "zbv", "v-half"),
        vocabularies=("vocab-2",),
        checkpointing=("none",),
        offload=("none", "free"),
    )
    plans = search_configurations(given, space, count=100, workers=1).plans
    best = min(plans, key=most)
    one = best.configuration
    assert (one.schedule, one.offload) == ("v-half", "free")
    without = replace(one.decided(offload=OffloadOptions(activations="none")), copy_seconds=())
    assert best.seconds < 1.03 * evaluate(given, without).seconds
    kept = [most(plan) for plan in plans if plan.configuration.offload == "none"]
    assert most(best) < 0.85 * min(kept)


# --- the optimizer -------------------------------------------------------------------------------------------


def test_moments_go_to_the_host_where_that_is_faster_than_to_compute_again(roomy: Problem) -> None:
    one = configuration("zb-h1", "vocab-2", open=("activation_checkpointing",), offload="none", host_share=None)
    plenty = evaluate(roomy, one)
    assert plenty.configuration.host_share == 0
    sizes = [needed(evaluate(roomy, replace(one, host_share=share)), roomy) for share in (0.0, 1.0)]
    assert sizes[1] < sizes[0]
    given = problem((0.6 * sizes[0] + 0.4 * sizes[1]) / GIB)
    chosen = evaluate(given, one)
    assert chosen.fits and 0 < chosen.configuration.host_share < 1
    assert set(chosen.configuration.checkpointing) == {"none"}
    assert chosen.end_seconds > plenty.end_seconds and chosen.pipeline_seconds == plenty.pipeline_seconds
    less = evaluate(given, replace(one, host_share=chosen.configuration.host_share - 0.25, open=()))
    assert not less.fits
    again = evaluate(given, replace(one, host_share=0.0))
    assert again.fits and again.seconds > chosen.seconds
    tables = planned_tables(given, chosen, BASE, "planned", "H100-80G")
    assert tables["optimizer"] == {"host_share": chosen.configuration.host_share}


@pytest.mark.slow
def test_where_computing_again_is_faster_moments_stay() -> None:
    """One microbatch per step: the optimizer is a large part of it."""
    one = configuration("1f1b", "vocab-2", 1, open=("activation_checkpointing",), offload="none", host_share=None)
    roomy = problem(1000)
    sizes = [needed(evaluate(roomy, replace(one, host_share=share)), roomy) for share in (0.0, 1.0)]
    given = problem((sizes[0] + sizes[1]) / 2 / GIB)
    chosen, resident = evaluate(given, one), evaluate(given, replace(one, host_share=0.0))
    moved = [evaluate(given, replace(one, host_share=share)) for share in (0.25, 0.5, 0.75, 1.0)]
    assert resident.fits and any(plan.fits for plan in moved)
    assert chosen.seconds == resident.seconds < min(plan.seconds for plan in moved)
    assert chosen.configuration.host_share == 0
