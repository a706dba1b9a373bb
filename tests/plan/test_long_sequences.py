"""Plans for long sequences: context parallelism across nodes, slices, and what practitioners run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import BloomConfig, LlamaConfig, PreTrainedConfig

from evenpipe.costs.hardware import KNOWN
from evenpipe.costs.timed_model import ends_of
from evenpipe.errors import InputError
from evenpipe.model import RowWork, describe, slice_ends
from evenpipe.plan.configuration import Configuration, costs_of
from evenpipe.plan.configuration_search import search_configurations
from evenpipe.plan.evaluation import Evaluation, least_work, timed, work_of
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.programs import extended, short_steps
from evenpipe.plan.ranking import by_lack, utilization
from evenpipe.plan.runnable import refusal
from evenpipe.plan.space import RUNNABLE, Space, layouts
from evenpipe.recipe.layout import Layout
from evenpipe.recipe.recipe import Recipe
from evenpipe.simulate import simulate
from evenpipe.train.planned_config import _pipeline

COMMON = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
LLAMA = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "small": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16},
}
LONG = 131072


def problem(size: str | PreTrainedConfig, **changes: Any) -> Problem:
    options: dict[str, Any] = {"gpus": 8, "sequence": LONG, "sequences_per_step": 8, "hardware": KNOWN["H100-80G"]}
    options |= changes
    config = size if isinstance(size, PreTrainedConfig) else LlamaConfig(**COMMON, **LLAMA[size])
    return problem_of(describe(config), options.pop("hardware"), **options)


@pytest.fixture(scope="module")
def small() -> Problem:
    """On a card where attention on pieces of sequences is as fast as on whole ones."""
    return problem("small", sequence=32768, hardware=KNOWN["A100-80G"])


# --- layouts -------------------------------------------------------------------------------------------------


def test_context_ranks_leave_the_node_only_with_many_tokens() -> None:
    cases = {(8192, 8), (16384, 16), (32768, 32), (65536, 64), (LONG, 128)}  # tp x cp at most
    for sequence, most in cases:
        found = [one.parallelism for one in layouts(problem("405B", gpus=512, sequence=sequence), Space())]
        assert max(one.tp * one.cp for one in found) == most
        assert max(one.tp for one in found) == 8
        assert all(sequence // one.cp >= 8192 for one in found if one.tp * one.cp > 8)


def test_heads_are_exchanged_where_that_is_faster() -> None:
    """Inside a node and across, by time: several context ranks of a node share its network cards in a gathering."""
    given = problem("8B", gpus=64)
    found = {
        (one.parallelism.tp, one.parallelism.cp): one.parallelism.context_exchange
        for one in layouts(given, Space(microbatch_sizes=(1,), zero=(1,)))
    }
    assert {axes: found[axes] for axes in ((1, 1), (1, 2), (1, 8), (8, 8))} == {
        (1, 1): "keys",
        (1, 2): "keys",
        (1, 8): "heads",
        (8, 8): "keys",  # a rank of 8 has 4 heads
    }


# --- slices --------------------------------------------------------------------------------------------------


def sliced(given: Problem, schedule: str, mode: str, slices: int, microbatches: int, **sizes: int) -> Configuration:
    options = {"stages_per_device": 2} if schedule == "interleaved" else {}
    recipe = Recipe.of(
        pp=4,
        microbatches=microbatches,
        slices=slices,
        sequence_length=given.sequence,
        schedule=schedule,
        schedule_options=options,
        vocabulary=mode,
        **sizes,  # type: ignore[arg-type]
    )
    shape = given.programs.shape(schedule, recipe.schedule_options, 4)
    assert shape is not None
    stages = shape.placement.stages
    recipe = Recipe.of(**_options(recipe), layers_per_stage=[given.layers // stages] * stages)
    return Configuration.of(given, recipe)


def _options(recipe: Recipe) -> dict[str, Any]:
    batch = recipe.batch
    return {
        "pp": recipe.devices,
        "cp": recipe.parallelism.cp,
        "microbatches": batch.microbatches,
        "slices": batch.slices,
        "sequence_length": batch.sequence_length,
        "schedule": recipe.schedule,
        "schedule_options": recipe.options,
        "vocabulary": recipe.vocabulary,
    }


@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2", "interlaced"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
def test_programs_of_slices_are_those_of_the_runtime(small: Problem, schedule: str, mode: str) -> None:
    one = sliced(small, schedule, mode, 4, 8)
    layout = Layout.of(one.recipe, small.arranging, small.description.vocabulary_size, tied=small.description.tied)
    assert small.programs.of(one.recipe, 8)[1] == layout.program


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "first-last"), ("1f1b", "vocab-2"), ("zbv", "vocab-2")])
def test_two_short_steps_of_slices_say_how_long_a_long_one_takes(
    small: Problem, schedule: str, mode: str, slices: int
) -> None:
    one = sliced(small, schedule, mode, slices, 60)
    sizes = short_steps(4, 60, planned=mode != "first-last", slices=slices)
    assert sizes[1] - sizes[0] == (3 if mode == "first-last" else 12) * 4 // slices
    costs = costs_of(small, one)
    programs = {size: small.programs.of(one.recipe, size)[1] for size in (*sizes, 60)}
    found = extended(
        [simulate(programs[size], costs).makespan for size in sizes], sizes, 60, max(work_of(programs[60], costs))
    )
    assert found == pytest.approx(simulate(programs[60], costs).makespan, rel=0.005)


def test_slices_are_timed_with_the_cut_points_of_the_runtime(small: Problem) -> None:
    one = sliced(small, "1f1b", "first-last", 4, 8)
    assert ends_of(small, one.recipe) == slice_ends(RowWork.of(small.description), small.sequence, 4, 1)
    costs, whole = costs_of(small, one), costs_of(small, sliced(small, "1f1b", "first-last", 1, 8))
    assert set(costs.slices) >= {"F", "B", "I", "W", "tokens"}
    for name in "FBW":
        times, of_all = getattr(costs, name), getattr(whole, name)
        again = 1.3 if name == "B" else 1.0  # attention of pieces runs again in its backward
        assert of_all[1] * 0.999 < 4 * times[1] < of_all[1] * again * 1.2, "products of fewer tokens are slower"
    forwards = [one.F[1] for one in costs.by_slice(4)]  # type: ignore[index]
    assert max(forwards) / min(forwards) < 1.1, "slices take equal time, not equal length"
    assert max(costs.slices["tokens"]) / min(costs.slices["tokens"]) > 1.3
    program = small.programs.of(one.recipe, one.steps[0])[1]
    assert work_of(program, costs) == pytest.approx(least_work(small, one))


def test_slices_shorten_the_bubble_by_their_number(small: Problem) -> None:
    """1F1B: (p - 1) / (n m) of the ideal step."""
    rates = [timed(small, sliced(small, "1f1b", "vocab-2", slices, 4)).bubble_rate for slices in (1, 4)]
    assert rates[1] < 0.5 * rates[0]
    ends = [timed(small, sliced(small, "1f1b", "first-last", slices, 4)).seconds for slices in (1, 4)]
    assert ends[1] < ends[0]


def test_only_pipelines_of_long_sequences_are_cut_unless_asked() -> None:
    from evenpipe.plan.configuration_search import head_layers
    from evenpipe.plan.space import configurations

    def cuts(sequence: int, pp: int, batch: int = 8, schedules: tuple[str, ...] = ("1f1b",), **space: Any) -> set[int]:
        given = problem("8B", sequence=sequence, sequences_per_step=batch)
        chosen = Space(pp=(pp,), tp=(1,), cp=(1,), microbatch_sizes=(1,), schedules=schedules, **space)
        (layout, *_) = layouts(given, chosen)
        return {one.recipe.batch.slices for one in configurations(given, chosen, layout, head_layers(given, layout))}

    assert cuts(8192, 4) == {1} and cuts(LONG, 1) == {1} and cuts(LONG, 4) == {1, 4}
    assert cuts(LONG, 4, batch=64) == {1}, "many microbatches"
    assert cuts(8192, 4, slices=(2, 8)) == {2, 8}
    assert cuts(LONG, 4, schedules=("dualpipe-v",)) == {1}, "its passes run as one"


def test_written_plans_say_how_sequences_are_cut(small: Problem) -> None:
    one = sliced(small, "1f1b", "vocab-2", 4, 8)
    assert _pipeline(small, one)["slices"] == 4 and "context_parallel" not in _pipeline(small, one)
    shared = one.recipe.parallelism.__class__(cp=2, pp=4, context_exchange="heads")
    found = _pipeline(small, replace(one, recipe=replace(one.recipe, parallelism=shared)))
    assert (found["processes"], found["context_parallel"], found["context_exchange"]) == (8, 2, "heads")
    assert one.name.endswith("1 x 8 slices 4")


# --- what runs -----------------------------------------------------------------------------------------------


def test_pieces_of_sequences_are_runnable_where_the_model_can_be_cut() -> None:
    whole, pieces, slices = Recipe.of(pp=2), Recipe.of(pp=2, cp=2), Recipe.of(pp=2, slices=2)
    llama = problem("small", sequence=4096)
    assert [refusal(llama, one) for one in (whole, pieces, slices)] == [""] * 3
    assert {one.parallelism.cp for one in layouts(llama, RUNNABLE)} == {1, 2, 4, 8}
    bloom = problem(BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=99), sequence=512)
    assert refusal(bloom, whole) == ""
    for one, option in ((pieces, "context_parallel"), (slices, "slices")):
        assert refusal(bloom, one).startswith(f"BloomForCausalLM cannot be trained with {option}: ")
    found = search_configurations(bloom, replace(RUNNABLE, schedules=("1f1b",)), workers=1)
    assert {one.configuration.recipe.parallelism.cp for one in found.plans} == {1}
    without_memory = search_configurations(replace(bloom, memory_bytes=1, known={}), RUNNABLE, workers=1)
    assert any(one.layout.parallelism.cp > 1 for one in without_memory.rejected)
    names = [one.name for one in by_lack(without_memory)]
    assert names and not any("cp" in name for name in names)
    with pytest.raises(InputError, match="BloomForCausalLM cannot be trained with context_parallel"):
        layouts(bloom, Space(cp=(2,), only_runnable=True))


# --- what practitioners run ----------------------------------------------------------------------------------


def best(given: Problem, **space: Any) -> Evaluation:
    found = search_configurations(given, Space(**space), wanted=1, workers=1)
    assert found.best is not None
    return found.best


@pytest.mark.parametrize("kernels", ["megatron"])
def test_405b_on_512_gpus_is_planned_as_it_was_trained(kernels: str) -> None:
    """Llama 3 405B at 131 072 tokens and 16 Mi tokens a step: tp 8, cp 16, pp 16 on 16 384 H100, 38 % MFU (arXiv
    2407.21783, table 4); torchtitan on 512: tp 8, cp 4 to 8, pp 8 (arXiv 2410.06511). Before context parallelism
    crossed nodes: tp 8, pp 64."""
    given = problem("405B", gpus=512, sequences_per_step=128, kernels=kernels)
    schedules = {"schedules": ("1f1b", "zb-h1"), "vocabularies": ("first-last", "vocab-2")}
    found = best(given, **schedules, zero=(1, 3), microbatch_sizes=(1,), slices=(1,))
    sizes = found.configuration.recipe.parallelism
    assert sizes.tp == 8 and 8 <= sizes.cp <= 16
    assert found.bubble_rate < 0.1 and 0.3 < utilization(given, found) < 0.45
    inside = Space(**schedules, cp=(1,), zero=(1, 3), microbatch_sizes=(1,), slices=(1,))
    without = search_configurations(given, inside, wanted=1, workers=1).best
    assert without is None or without.seconds > 1.3 * found.seconds


def test_8b_on_64_gpus() -> None:
    """Few ranks share a layer, none of them across nodes; the pipeline is short."""
    given = problem("8B", gpus=64, sequences_per_step=32, kernels="megatron")
    found = best(given, schedules=("1f1b", "zb-h1"), vocabularies=("first-last", "vocab-2"), zero=(1, 3), slices=(1,))
    sizes = found.configuration.recipe.parallelism
    assert sizes.tp * sizes.cp <= 16 and sizes.tp <= 4 and sizes.pp <= 4 and found.bubble_rate < 0.1
    assert 0.3 < utilization(given, found) < 0.55
