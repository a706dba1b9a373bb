"""From a model's layers and a schedule to stages and programs: options, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from evenpipe.errors import InputError
from evenpipe.recipe.layout import Layout, ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Order, generate


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


REFUSED = [
    # schedule, layers, options, what the sentence says
    ("1f1b", 1, {}, "2 stages, but the model has 1 layer: .* take fewer devices, or a schedule with fewer stages"),
    ("interleaved", 3, {}, "4 stages, but .* 3 layers: .* or a smaller stages_per_device in schedule_options"),
    ("zbv", 3, {}, "4 stages, but .* 3 layers: .* or a schedule with fewer stages per device"),
    (lambda p, m: generate("zbv", p, m), 3, {}, "4 stages, but .* 3 layers: .* take an order with fewer stages"),
    ("1f1b", 8, {"stages_per_device": 2}, "schedule '1f1b' has 1 stage per device, not 2"),
    ("1f1b", 8, {"group_size": 2}, "schedule '1f1b' has no option 'group_size'; its options: none"),
    ("1f1b", 8, {"microbatches": 2}, "schedule_options: microbatches is not an option of a schedule"),
    ("interleaved", 8, {"stages_per_device": 0}, "stages_per_device must be a whole number of at least 1, not 0"),
    (generate("1f1b", 2, 4), 8, {"stages_per_device": 1}, "stages_per_device given, but only a schedule with a name"),
]


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    for schedule, layers, options, says in REFUSED:
        with pytest.raises(InputError, match=says) as caught:
            layout(schedule, layers=layers, schedule_options=options)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="communicators: 'two', expected one of per-pair, per-kind, one"):
        layout("1f1b", communicators="two")


def test_orders_with_recomputation_are_taken() -> None:
    order = Order.from_csv("0F0,0F1,0R0,0B0,0R1,0B1")
    found = layout(order, devices=1, microbatches=2)
    assert sum(str(item).startswith("0R") for item in found.program.rows[0]) == 2


def test_communicators() -> None:
    for communicators, expected in (("per-pair", 6), ("per-kind", 6), ("one", 1)):
        made = layout("1f1b", communicators=communicators)
        assert len(made.communicators) == len(made.program.communicators) == expected
        assert made.evaluation.communicators.items() <= made.communicators.items()
