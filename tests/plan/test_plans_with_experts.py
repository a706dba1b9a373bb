"""Plans whose replicas share experts: what is looked at, what bounds them, and what is written for a run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import planned_problems
import pytest
import torch
from families import tiny_config

from evenpipe.costs.hardware import KNOWN
from evenpipe.errors import InputError
from evenpipe.memory.traced import StageTracer, Tracing
from evenpipe.model import describe
from evenpipe.plan.configuration import costs_of
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import evaluate, parameters_per_device
from evenpipe.plan.layer_memory import saved_floor
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.ranking import Ranking
from evenpipe.plan.space import Space, configurations, layouts
from evenpipe.recipe.recipe import Recipe
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.planned_config import model_tables, planned_tables


@cache
def problem(*, memory: float = 24.0, gpus: int = 16, kernels: str = "transformers", skew: float = 1.0) -> Problem:
    sizes = {"memory": memory, "gpus": gpus, "kernels": kernels, "skew": skew}
    return planned_problems.problem("mixtral", hardware="H100-80G", **sizes)


ALONE = {"pp": (2, 4), "tp": (1,), "cp": (1,), "zero": (1,), "microbatch_sizes": (1,)}
SMALL = Space(**ALONE, schedules=("1f1b", "zb-h1"), vocabularies=("first-last", "vocab-2"))


def test_replicas_share_experts_in_all_even_numbers() -> None:
    found = {(one.parallelism.dp, one.parallelism.ep) for one in layouts(problem(), SMALL)}
    assert found == {(8, 1), (8, 2), (8, 4), (8, 8), (4, 1), (4, 2), (4, 4)}
    others = {(one.parallelism.dp, one.parallelism.ep) for one in layouts(problem(kernels="megatron"), SMALL)}
    assert others == found
    for one in layouts(problem(), SMALL):
        beside = one.parallelism.experts
        assert (beside.columns == "auto") is (one.parallelism.ep == 1)


def test_what_cannot_share_experts_is_one_sentence() -> None:
    with pytest.raises(InputError, match="must be at most 16, the number of experts"):
        layouts(problem(gpus=64), Space(ep=(32,)))
    with pytest.raises(InputError, match="LlamaForCausalLM has no experts"):
        layouts(planned_problems.problem(), Space(ep=(2,)))


def test_members_have_their_share_of_the_experts() -> None:
    given = problem()
    for layout in layouts(given, SMALL):
        one = next(iter(configurations(given, SMALL, layout, 1.0)))
        held = parameters_per_device(given, one)
        whole = sum(work.expert_parameters for work in given.works)
        assert sum(device.experts for device in held) == pytest.approx(whole / layout.parallelism.ep)


@pytest.mark.slow
def test_a_skew_takes_time_and_memory() -> None:
    even, skewed = problem(memory=80), problem(memory=80, skew=2.0)
    layout = next(one for one in layouts(even, SMALL) if one.parallelism.ep == 4)
    one = next(iter(configurations(even, SMALL, layout, 1.0)))
    before, after = evaluate(even, one), evaluate(skewed, one)
    assert before.seconds < after.seconds < 2 * before.seconds
    assert all(a.peak_bytes > b.peak_bytes for a, b in zip(after.devices, before.devices, strict=True))
    assert min(map(min, (costs_of(skewed, one).F, costs_of(skewed, one).B))) > 0


def test_a_plan_is_written_for_a_run(tmp_path: Path) -> None:
    given = problem()
    space = Space(ep=(4,), tp=(1,), cp=(1,), pp=(2,), zero=(0,), microbatch_sizes=(1,), schedules=("1f1b",))
    found = search_configurations(given, space, count=1, workers=1)
    assert found.best is not None
    base = {**model_tables(given.description, str(tmp_path)), "experts": {"columns": 1}}
    tables = planned_tables(given, found.best, base, "planned", "H100-80G")
    read = config_from_dict(tables)
    assert (read.pipeline.processes, read.pipeline.dp, read.pipeline.ep) == (16, 8, 4)
    beside = found.best.configuration.recipe.parallelism.experts
    assert (read.experts.columns, read.experts.arrivals) == (beside.columns, beside.arrivals)
    assert "dp8·ep4·pp2" in found.best.configuration.name
    assert read.pipeline.arrange == "H100-80G", "the order that the plan was timed with"


def test_floors_hold_for_eager_attention() -> None:
    """gpt-oss keeps the probabilities of attention."""
    description = describe(tiny_config("gpt_oss"))
    given = problem_of(description, KNOWN["H100-80G"], gpus=2, sequence=64, sequences_per_step=4)
    setting = given.setting(Recipe.of(pp=2, sequence_length=64))
    tracer = StageTracer(description, Tracing(sequence=64, compute_dtype=torch.bfloat16))
    for layer, work in enumerate(given.works[:2]):
        stage = tracer.stage(layer, layer + 1, is_first=False, is_last=False, sequences=1)
        none, selective, full = saved_floor(work, setting)
        assert full <= selective <= none <= stage.input + stage.stored
        assert none > saved_floor(work, replace(setting, kernels=setting.kernels._replace(attention="flash")))[0]


@pytest.mark.slow
def test_layouts_that_cannot_be_estimated_are_left_out_once_and_for_all() -> None:
    """How Megatron-LM would cut Bloom's attention is not known."""
    sizes = {"gpus": 4, "sequence": 512, "sequences_per_step": 8, "kernels": "megatron"}
    given = planned_problems.problem(tiny_config("bloom"), **sizes)
    found = search_configurations(given, Space(schedules=("1f1b",)), workers=1)
    sizes = [one.configuration.recipe.parallelism for one in (*found.plans, *found.failed)]
    assert sizes and all(one.tp == 1 for one in sizes)
    ((reason, number),) = found.refused.items()
    assert "in Megatron-LM layers cannot be shared" in reason
    text = Ranking(replace(found, plans=[]), 1).text()
    assert f"no plan fits\nleft out: {number} layouts: {reason}" in text
