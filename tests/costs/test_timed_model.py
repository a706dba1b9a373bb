"""What orders of runs are arranged by: pass times on known hardware, the same as those of the planner; else FLOPs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamas import llama

from evenpipe.costs.hardware import KNOWN, write_hardware
from evenpipe.costs.timed_model import arranging_model
from evenpipe.errors import InputError
from evenpipe.memory.estimate import estimate
from evenpipe.recipe.layout import Layout, ModelCosts
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Program

H100 = KNOWN["H100-80G"]
MODEL = llama(layers=16)
ROWS = MODEL.vocabulary_size


def recipe(**options: Any) -> Recipe:
    options = {"pp": 4, "microbatches": 12, "schedule": "v-half", "sequence_length": 4096} | options
    return Recipe.of(**options)


def program(model: ModelCosts, one: Recipe) -> Program:
    return Layout.of(one, model, ROWS, ROWS, tied=False).program


BY_FLOPS = ModelCosts.of(MODEL, 4096)


def test_which_hardware_arranges_an_order(tmp_path: Path) -> None:
    """A name, a file, the hardware at hand if its dtype is known, or none: then FLOPs."""
    file = tmp_path / "ours.toml"
    write_hardware(replace(H100, name="ours", operation_seconds=1e-3), file)
    for arrange, at_hand, dtype, expected in (
        ("auto", None, "bf16", "flops"),
        ("auto", H100, "bf16", "H100-80G"),
        ("auto", H100, None, "flops"),
        ("flops", H100, "bf16", "flops"),
        ("A100-80G", H100, "bf16", "A100-80G"),
        ("h200", None, "fp32", "H200"),
        (str(file), None, "bf16", "ours"),
    ):
        found = arranging_model(MODEL, recipe(arrange=arrange), at_hand, dtype)
        assert found.hardware == expected
        assert (found.times is None) == (expected == "flops")
    with pytest.raises(InputError, match=r'hardware is "H1000"; it must be one of .*; did you mean "H100-80G"'):
        arranging_model(MODEL, recipe(arrange="H1000"), None, "bf16")


def test_times_arrange_another_order_than_flops_and_costs_win() -> None:
    known = arranging_model(MODEL, recipe(), H100, "bf16")
    by_times = program(known, recipe())
    assert by_times != program(BY_FLOPS, recipe())
    longer = replace(known, times=lambda *given: scaled(known, given, 1.003))
    assert program(longer, recipe()) == by_times
    costs = Layout.of(recipe(), BY_FLOPS, ROWS, ROWS, tied=False).costs
    assert program(known, recipe(costs=costs)) == program(BY_FLOPS, recipe())


def scaled(model: ModelCosts, given: Any, factor: float) -> Any:
    """The times of a model, longer by a factor."""
    assert model.times is not None
    costs = model.times(*given)
    each = {name: tuple(factor * time for time in getattr(costs, name)) for name in "FBIW"}
    others = {name: factor * getattr(costs, name) for name in ("S", "C", "T", "E", "G", "p2p")}
    return replace(costs, **each, **others, collectives={name: factor * one for name, one in costs.collectives.items()})


def test_an_estimate_has_the_order_of_a_run_on_its_hardware() -> None:
    one = recipe(layers_per_stage=(2,) * 8)
    found = estimate(MODEL, one, hardware=H100)
    by_run = estimate(
        MODEL, replace(one, schedule=program(arranging_model(MODEL, one, H100, "bf16"), one)), hardware=H100
    )
    assert [device.process for device in found.devices] == [device.process for device in by_run.devices]


def test_a_run_whose_sequences_have_no_known_length_is_arranged_all_the_same() -> None:
    for sizes in ({"cp": 3}, {"cp": 2, "tp": 3, "dp": 2}):
        one = recipe(sequence_length=None, layers_per_stage=(2,) * 8, **sizes)
        assert program(arranging_model(MODEL, one, H100, "bf16"), one).devices == 4
