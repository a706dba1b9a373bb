"""A recipe: what it is given as, what it is afterwards, what it refuses, its stages, and how sequences are cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import wrong_refusals

from evenpipe.declaration import field_types
from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.model import RowWork
from evenpipe.recipe.batch_shape import BatchShape
from evenpipe.recipe.layout import Layout, ModelCosts
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import DATA_PARALLEL, Parallelism
from evenpipe.recipe.recipe import Recipe, RecipeOptions
from evenpipe.recipe.slice_choice import with_slices
from evenpipe.recipe.sliced_costs import sliced_costs, whole_costs
from evenpipe.recipe.unused_options import unused_options
from evenpipe.schedule import Costs, Order, check_program, generate, time_order

ORDER = generate("1f1b", 2, 3)


def test_one_table_of_options_is_the_same_as_its_parts() -> None:
    options = {
        "schedule_options": {"stages_per_device": 2, "group_size": None},
        "activation_checkpointing": ["full", "none"],
    }
    flat = Recipe.of(dp=2, pp=4, microbatches=6, vocabulary="balanced", layers_per_stage=[1] * 8, **options)
    parts = Recipe(
        parallelism=Parallelism(dp=2, pp=4),
        batch=BatchShape(microbatches=6),
        schedule_options=(("stages_per_device", 2),),
        vocabulary="vocab-2",
        layers_per_stage=(1,) * 8,
        activation_checkpointing=("full", "none"),
    )
    assert flat == parts and hash(flat) == hash(parts)
    assert flat.options == {"stages_per_device": 2}
    assert replace(flat, vocabulary="vocab-1").schedule_options == flat.schedule_options


def test_one_table_has_the_fields_of_all_parts() -> None:
    parts = {*field_types(Recipe), *field_types(Parallelism), *field_types(BatchShape)}
    assert parts - {"parallelism", "batch", "dp", "pp"} == {*RecipeOptions.__annotations__}


def test_the_number_of_microbatches_is_always_known() -> None:
    def order(devices: int, microbatches: int) -> Order:
        return generate("1f1b", devices, microbatches)

    for options, microbatches in (
        ({}, 8),
        ({"microbatches": 5}, 5),
        ({"schedule": ORDER}, 3),
        ({"schedule": order}, 8),
    ):
        assert Recipe.of(pp=2, **options).microbatches == microbatches


def test_a_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text(ORDER.to_csv())
    read = Recipe.of(pp=2, schedule=file)
    file.unlink()
    assert (replace(read, vocabulary="vocab-1").schedule, read.microbatches) == (ORDER, 3)


def test_values_that_stand_for_others() -> None:
    assert Recipe.of(activation_checkpointing="full").checkpointing_of(3) == ("full",) * 3
    assert Recipe.of(activation_checkpointing=["full", "none"]).checkpointing_of(2) == ("full", "none")
    assert [Parallelism(dp=2, data_parallel=kind).zero for kind in DATA_PARALLEL] == [0, 1, 2, 3]
    assert OffloadOptions(layers=["keep", "offload", "keep"]).kept_layers(3) == {0, 2}  # type: ignore[arg-type]
    assert OffloadOptions().kept_layers(3) == set()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pp": 0}, "pp is 0; it must be an integer of at least 1"),
    ({"dp": 4, "ep": 3}, "ep is 3; it must be a divisor of dp, 4"),
    ({"dp": 4, "dp_shard": 2}, 'dp_shard is 2; it must be left out with data_parallel "replicate"'),
    ({"dp": 4, "dp_shard": 3, "data_parallel": "shard"}, "dp_shard is 3; it must be a divisor of dp, 4, and a"),
    ({"reshard": True}, 'reshard is true; it must be left out unless data_parallel is "shard"'),
    ({"context_exchange": "star"}, 'context_exchange is "star"; it must be one of auto, keys, heads'),
    ({"slices": "all"}, 'slices is "all"; it must be an integer of at least 1 or "auto"'),
    ({"microbatch_size": True}, "microbatch_size is true; it must be an integer of at least 1"),
    ({"communicators": "two"}, 'communicators is "two"; it must be one of per-pair, per-kind, one'),
    ({"layers_per_stage": [1, -1]}, "layers_per_stage[1] is -1; it must be an integer of at least 0"),
    ({"costs": 3}, "costs is 3; it must be a Costs or none"),
    ({"offload": {"streams": 2}}, "offload is {'streams': 2}; it must be an OffloadOptions"),
    ({"vocabulary": "vocab-3"}, 'vocabulary is "vocab-3"; it must be one of balanced, first-last, redistribute,'),
]


REFUSED_BY_A_RUN = [
    ({"tp": 2, "sequence_parallel": False}, "sequence_parallel is false; it must be true, since tensor ranks share"),
    ({"dp": 2, "data_parallel": "shard-gradients"}, 'data_parallel is "shard-gradients"; it must be replicate or'),
    (
        {"activation_checkpointing": ["full", "none", "full"]},
        'checkpointing is ["full", "none", "full"]; it must be one choice',
    ),
]


def test_what_is_not_accepted_is_refused_in_one_sentence() -> None:
    def run(**options: Any) -> None:
        recipe = Recipe.of(**options)
        recipe.check_runnable()
        recipe.checkpointing_of(2)

    assert not wrong_refusals(lambda options: Recipe.of(**options), REFUSED)
    assert not wrong_refusals(lambda options: run(**options), REFUSED_BY_A_RUN)
    with pytest.raises(TypeError, match=r"unknown argument 'microbatch'; known: cp, .*; did you mean .microbatches."):
        Recipe.of(microbatch=2)  # type: ignore[call-arg]


# ---- from a model's layers and a recipe to stages and programs


def layout(schedule: Any, *, layers: int = 8, devices: int = 2, microbatches: int = 4, **options: Any) -> Layout:
    options = {"vocabulary": "vocab-2", **options}
    model = ModelCosts(layers=(1.0,) * layers, head=2.0)
    return Layout.of(
        Recipe.of(pp=devices, microbatches=microbatches, schedule=schedule, **options),
        model,
        embedding_rows=100,
        head_rows=100,
        tied=False,
    )


STAGES = [
    # schedule, options, devices, layers, layers of each stage
    ("1f1b", {}, 2, 8, [4, 4]),
    ("interleaved", {}, 2, 8, [2, 2, 2, 2]),
    ("interleaved", {"stages_per_device": 3}, 2, 8, [2, 2, 1, 1, 1, 1]),
    ("gis", {"stages_per_device": 3, "group_size": 2}, 2, 6, [1] * 6),
    ("zbv", {"stages_per_device": 2}, 2, 4, [1] * 4),
]


def test_options_of_a_named_schedule() -> None:
    for schedule, options, devices, layers, expected in STAGES:
        made = layout(schedule, layers=layers, devices=devices, schedule_options=options)
        assert sorted((last - first for first, last in made.layers), reverse=True) == expected
        assert made.program.placement == generate(schedule, devices, 4, **options).placement


MISFITS = [
    # schedule, layers, options, what the sentence says
    ("1f1b", 1, {}, "2 stages, but the model has 1 layer: .* take fewer devices, or a schedule with fewer stages"),
    ("interleaved", 3, {}, "4 stages, but .* 3 layers: .* or a smaller stages_per_device in schedule_options"),
    ("zbv", 3, {}, "4 stages, but .* 3 layers: .* or a schedule with fewer stages per device"),
    (lambda p, m: generate("zbv", p, m), 3, {}, "4 stages, but .* 3 layers: .* take an order with fewer stages"),
    ("1f1b", 8, {"microbatches": 2}, "schedule_options: microbatches is not an option of a schedule"),
    (generate("1f1b", 2, 4), 8, {"stages_per_device": 1}, "stages_per_device given, but only a schedule with a name"),
]


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    for schedule, layers, options, says in MISFITS:
        with pytest.raises(InputError, match=says) as caught:
            layout(schedule, layers=layers, schedule_options=options)
        assert "\n" not in str(caught.value)


def test_communicators() -> None:
    for communicators, expected in (("per-pair", 6), ("per-kind", 4), ("one", 1)):
        made = layout("1f1b", communicators=communicators)
        assert len(made.communicators) == len(made.program.communicators) == expected
        assert made.evaluation.communicators.items() <= made.communicators.items()


# ---- costs of slices from costs of whole sequences, and the number that "auto" stands for


ROWS = RowWork(per_token=1.0, per_key=((None, 1e-4),))
"""As much attention as products in a row of 20 000 tokens."""


def model(length: int, layers: int = 8) -> ModelCosts:
    return ModelCosts(layers=(1.0,) * layers, head=2.0, rows=ROWS, length=length)


def auto(length: int, torch_device: str = "cpu", **options: Any) -> tuple[int, str]:
    options = {"schedule": "1f1b", "microbatches": 8, "pp": 4, **options}
    recipe, why = with_slices(Recipe.of(slices="auto", **options), model(length), torch_device)
    return recipe.slices, why


def test_parts_add_up_to_the_whole() -> None:
    whole = Costs(F=(4, 8), I=6, W=2, S=1, T=0.5, E=0.25, G=0.25, p2p=0.5, bytes=100)
    found = sliced_costs(whole, ROWS, (700, 1000, 1300))
    each = found.by_slice(3)
    for name in ("F", "I", "W", "S", "T", "E", "p2p", "bytes"):
        sums = [value if isinstance(value, tuple) else (value,) for value in (getattr(one, name) for one in each)]
        given = getattr(whole, name)
        given = given if isinstance(given, tuple) else (given,)
        assert tuple(map(sum, zip(*sums, strict=True))) == pytest.approx(given), name
    assert found.token_factors == pytest.approx((2100 / 1300, 900 / 1300, 900 / 1300))
    assert [one.W for one in each] == pytest.approx([2 * 700 / 1300, 2 * 300 / 1300, 2 * 300 / 1300])
    assert each[1].F[0] < each[2].F[0], "as many tokens, more keys"  # type: ignore[index]
    again = whole_costs(found)
    assert (again.F, again.W, again.p2p, again.slices) == (pytest.approx((4, 8)), pytest.approx(2), 0.5, {})
    assert whole_costs(whole) is whole


def test_longer_sequences_have_more_slices() -> None:
    chosen = [auto(length)[0] for length in (64, 1024, 16384, 131072)]
    assert chosen == sorted(chosen) and chosen[0] == 1 and chosen[-1] >= 8
    on_gpus = [auto(length, "cuda")[0] for length in (64, 1024, 16384, 131072)]
    assert all(one <= other for one, other in zip(on_gpus, chosen, strict=True)) and on_gpus[1] == 1


def test_the_reason_is_said() -> None:
    slices, why = auto(16384)
    assert why.startswith(f"{slices}; predicted steps relative to whole sequences of 16384 tokens: 2: 0.")
    slices, why = auto(32, pp=1)
    assert slices == 1 and why.startswith("1; predicted steps")
    assert auto(16384, schedule="dualpipe-v", pp=2)[1].startswith("1; not 2: sequences cannot be cut in an order with ")
    order = Order.from_csv("0F0,0F0.1,0B0.1,0B0")
    assert auto(64, schedule=order, pp=1, microbatches=None) == (2, "2, as in the given order")
    assert auto(1, pp=2) == (1, "1; a sequence has no 2 slices of at least 1 token")
    assert auto(16, cp=4, pp=2)[0] == 1


def test_a_model_that_cannot_be_cut_keeps_whole_sequences() -> None:
    recipe = Recipe.of(slices="auto", schedule="1f1b", microbatches=8, pp=4)
    asked = []

    def refusal() -> str:
        asked.append(1)
        return "Mamba cannot be trained with slices: it has no attention."

    found, why = with_slices(recipe, model(16384), "cpu", refusal)
    assert (found.slices, why, asked) == (1, "1, since Mamba cannot be trained with slices: it has no attention.", [1])
    with_slices(recipe, model(16), "cpu", refusal)
    assert asked == [1], "it is not asked for whole sequences"


def test_a_number_stays() -> None:
    recipe = Recipe.of(slices=3)
    assert with_slices(recipe, model(64), "cpu") == (recipe, "")
    with pytest.raises(InputError, match='slices is "auto"; it must be a number of at least 1'):
        _ = Recipe.of(slices="auto").slices


def test_every_schedule_and_mode(sample) -> None:
    modes = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")
    for schedule, mode in sample(itertools.product(("1f1b", "zb-h1", "interleaved", "v-half"), modes), 5):
        slices, why = auto(4096, schedule=schedule, vocabulary=mode, pp=4, microbatches=4)
        if mode != "interlaced":  # whose layout of whole sequences is better than that of slices
            assert slices >= 2 and "2: 0." in why, (schedule, mode)


def test_programs_are_arranged_by_costs_of_their_slices() -> None:
    def layout(costs: Costs | None = None, *, slices: int = 4) -> Layout:
        recipe = Recipe.of(pp=4, microbatches=4, slices=slices, costs=costs, sequence_length=16384)
        return Layout.of(recipe, model(16384), embedding_rows=100, head_rows=100, tied=False)

    by_costs, by_flops = layout(Costs(F=1.0, I=1.0, W=1.0, S=0.4, T=0.4, E=0.1, G=0.1)), layout()
    assert len(by_costs.costs.slices["F"]) == 4 and by_flops.costs.slices == {}
    assert check_program(by_costs.program).ok and check_program(by_costs.evaluation).ok
    times = [time_order(one.program.order, by_costs.costs).makespan for one in (by_costs, by_flops)]
    assert times[0] <= times[1] * 1.0001
    measured = by_costs.costs
    assert layout(measured).costs.slices == measured.slices
    assert len(layout(measured, slices=2).costs.slices["F"]) == 2
    assert layout(measured, slices=1).costs.slices == {}


def test_the_order_of_a_function_is_cut_into_slices() -> None:
    def layout(schedule: Any) -> Layout:
        recipe = Recipe.of(pp=4, microbatches=4, slices=3, vocabulary="first-last", schedule=schedule)
        return Layout.of(recipe, model(4096), embedding_rows=100, head_rows=100, tied=False)

    by_function = layout(lambda devices, microbatches: generate("1f1b", devices, microbatches))
    assert by_function.program.slices == 3
    assert by_function.program == layout("1f1b").program


def test_measured_slices_decide_where_rows_are_cut() -> None:
    true = ROWS.with_share(0.8, 4096)
    measured = sliced_costs(Costs(F=1.0, B=2.0), true, (1024, 2048, 3072, 4096))
    given = model(4096)
    assert given.rows_for(Recipe.of(slices=4)).share(4096) == pytest.approx(ROWS.share(4096))
    assert given.rows_for(Recipe.of(slices=4, costs=measured)).share(4096) == pytest.approx(0.8)


def test_a_length_that_does_not_divide_is_arranged_all_the_same() -> None:
    """The default length is nobody's: steps have others."""
    recipe = Recipe.of(pp=2, cp=3, microbatches=2, slices=3, costs=Costs(F=1, B=2, S=0, T=0, E=0, G=0))
    assert len(Layout.of(recipe, model(2048), embedding_rows=100, head_rows=100, tied=False).costs.slices["F"]) == 3


# --- options without an effect ---------------------------------------------------------------------------------------

UNUSED: list[tuple[dict[str, Any], bool, list[str]]] = [
    # options, whether activations move, the sentences
    ({"pp": 4, "offload": OffloadOptions(activations="all")}, False, []),
    ({"dp": 2, "data_parallel": "shard", "reshard": True, "prefetch": 1}, False, []),
    ({"cp": 2, "data_parallel": "shard", "context_exchange": "keys"}, False, []),
    ({"tp": 2, "tensor_overlap": "ring"}, False, []),
    ({"dp": 2, "ep": 2, "experts": ExpertOptions(columns=2)}, False, []),
    ({"offload": OffloadOptions(host_memory=1 << 20, layers=("keep", "offload"), streams=2)}, True, []),
    (
        {"data_parallel": "shard", "reshard": True, "prefetch": 0},
        False,
        [
            "data_parallel = 'shard' has no effect: there is one replica",
            "reshard = True has no effect: there is one replica",
            "prefetch = 0 has no effect: there is one replica",
        ],
    ),
    (
        {"dp": 2, "context_exchange": "heads", "tensor_overlap": "none", "experts": ExpertOptions(arrivals=1)},
        False,
        [
            "context_exchange = 'heads' has no effect: there is one context rank",
            "tensor_overlap = 'none' has no effect: there is one tensor rank",
            "experts has no effect: no replicas share experts",
        ],
    ),
    (
        {"offload": OffloadOptions(host_memory=4096, layers=("keep", "offload"), when_full="keep")},
        False,
        [
            "offload.layers has no effect: no activations go to the host",
            "offload.host_memory = 4096 has no effect: no activations go to the host",
            "offload.when_full = 'keep' has no effect: no activations go to the host",
        ],
    ),
]


def test_options_without_an_effect_are_named() -> None:
    for options, moves, sentences in UNUSED:
        assert list(unused_options(Recipe.of(microbatches=4, **options), moves=moves)) == sentences
