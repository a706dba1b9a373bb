"""A recipe: what it is given as, what it is afterwards, what it refuses, and the stages that it lays out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenpipe.errors import InputError
from evenpipe.recipe.batch_shape import BatchShape
from evenpipe.recipe.layout import Layout, ModelCosts
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import DATA_PARALLEL, Parallelism
from evenpipe.recipe.recipe import Recipe, RecipeOptions
from evenpipe.schedule import Order, generate

ORDER = generate("1f1b", 2, 3)


def test_one_table_of_options_is_the_same_as_its_parts() -> None:
    flat = Recipe.of(
        dp=2,
        pp=4,
        data_parallel="shard",
        microbatches=6,
        sequence_length=32,
        schedule="interleaved",
        schedule_options={"stages_per_device": 2, "group_size": None},
        vocabulary="balanced",
        layers_per_stage=[1] * 8,
        checkpointing=["full", "none"],
        offload=None,
    )
    parts = Recipe(
        parallelism=Parallelism(dp=2, pp=4, data_parallel="shard"),
        batch=BatchShape(microbatches=6, sequence_length=32),
        schedule="interleaved",
        schedule_options=(("stages_per_device", 2),),
        vocabulary="vocab-2",
        layers_per_stage=(1,) * 8,
        checkpointing=("full", "none"),
    )
    assert flat == parts and hash(flat) == hash(parts)
    assert flat.options == {"stages_per_device": 2}
    assert replace(flat, vocabulary="vocab-1").schedule_options == flat.schedule_options


def test_every_option_has_a_field_of_its_name() -> None:
    fields = {*Recipe.__slots__, *Parallelism.__slots__, *BatchShape.__slots__} - {"parallelism", "batch"}
    assert fields - {"dp", "pp"} == set(RecipeOptions.__annotations__)


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
    assert Recipe.of(checkpointing="full").checkpointing_of(3) == ("full",) * 3
    assert Recipe.of(checkpointing=["full", "none"]).checkpointing_of(2) == ("full", "none")
    assert [Parallelism(dp=2, data_parallel=kind).zero for kind in DATA_PARALLEL] == [0, 1, 2, 3]
    assert OffloadOptions(layers=["keep", "offload", "keep"]).kept_layers(3) == {0, 2}  # type: ignore[arg-type]
    assert OffloadOptions().kept_layers(3) == set()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pp": 0}, "pp is 0, expected a whole number of at least 1"),
    ({"dp": 4, "ep": 3}, "ep is 3, expected a divisor of dp = 4"),
    ({"context_exchange": "star"}, "context_exchange is 'star', expected auto, keys or heads"),
    ({"slices": "all"}, "slices: 'all', expected a whole number of at least 1 or 'auto'"),
    ({"microbatch_size": True}, "microbatch_size: True, expected a whole number of at least 1"),
    ({"sequence_length": 1.5}, "sequence_length: 1.5, expected a whole number of at least 1"),
    ({"communicators": "two"}, "communicators: 'two', expected one of per-pair, per-kind, one"),
]


REFUSED_BY_A_RUN = [
    ({"tp": 2, "sequence_parallel": False}, "sequence_parallel: False, expected True"),
    ({"dp": 2, "data_parallel": "shard-gradients"}, "data_parallel: 'shard-gradients', expected 'replicate' or"),
    ({"checkpointing": ["full"]}, "checkpointing: 1 choice, expected one for each of the model's 2 layers"),
]


def test_what_is_not_accepted_is_refused_in_one_sentence() -> None:
    def run(**options: Any) -> None:
        recipe = Recipe.of(**options)
        recipe.check_runnable()
        recipe.checkpointing_of(2)

    for made, cases in ((Recipe.of, REFUSED), (run, REFUSED_BY_A_RUN)):
        for options, says in cases:
            with pytest.raises(InputError) as caught:
                made(**options)
            assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="unknown argument 'microbatch', did you mean 'microbatches'"):
        Recipe.of(microbatch=2)  # type: ignore[call-arg]


# ---- from a model's layers and a recipe to stages and programs


def layout(schedule: Any, *, layers: int = 8, devices: int = 2, microbatches: int = 4, **options: Any) -> Layout:
    options = {"vocabulary": "vocab-2", **options}
    model = ModelCosts(layers=(1.0,) * layers, head=2.0)
    return Layout.of(
        Recipe.of(pp=devices, microbatches=microbatches, schedule=schedule, **options), model, rows=100, tied=False
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
    for communicators, expected in (("per-pair", 6), ("per-kind", 6), ("one", 1)):
        made = layout("1f1b", communicators=communicators)
        assert len(made.communicators) == len(made.program.communicators) == expected
        assert made.evaluation.communicators.items() <= made.communicators.items()
