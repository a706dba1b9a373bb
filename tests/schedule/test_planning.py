"""Names of schedules and modes, and the way from them to a program: sound at every size, or refused with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import completes, end_times, order_is_sound, random_costs, random_order

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    SCHEDULES,
    Costs,
    DeadlockError,
    Order,
    Placement,
    add_vocabulary,
    check_order,
    check_program,
    evaluation_program,
    generate,
    interlace,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.registry import generate as registered
from evenpipe.schedule.registry import options_of

# --- every schedule ---------------------------------------------------------------------------------------------------

OPTIONS = {
    "stages_per_device": lambda rng, devices: rng.randint(1, 3),
    "group_size": lambda rng, devices: rng.randint(1, 2 * devices),
    "max_in_flight": lambda rng, devices: rng.choice([rng.uniform(1, 3 * devices), devices, 2.0 * devices]),
}
"""Values for the options that several families have; others stay at their defaults."""


def options(name: str, devices: int, rng: random.Random) -> dict[str, Any]:
    known = [option for option in options_of(name) if option in OPTIONS]
    return {option: OPTIONS[option](rng, devices) for option in known if rng.random() < 0.6}


def refused(error: InputError) -> None:
    """A refusal says in one sentence what the schedule needs; it is not the checker that stops what was made."""
    assert not isinstance(error, DeadlockError)
    assert "fault" not in str(error)
    assert str(error) and "\n" not in str(error)


@pytest.mark.parametrize("name", [*SCHEDULES, "random"])
@settings(max_examples=30)
@given(
    devices=st.integers(1, 7), microbatches=st.integers(1, 12), mode=st.sampled_from(MODES), seed=st.integers(0, 10**6)
)
@pytest.mark.sampled(4)
def test_programs_are_sound_in_every_mode_and_timed_as_the_second_opinion_times_them(
    name: str, devices: int, microbatches: int, mode: str, seed: int
) -> None:
    rng, schedule, chosen = random.Random(seed), name, {}
    try:
        if name == "random":
            placement = rng.choice([Placement.looped(devices, rng.randint(1, 3)), Placement.v_shape(devices)])
            base = schedule = random_order(seed, placement, microbatches, split=rng.random() < 0.5)
        else:
            chosen = options(name, devices, rng)
            base = generate(name, devices, microbatches, **chosen)
        costs = rng.choice([None, random_costs(seed, base.placement)])
        order, program = plan_program(schedule, devices, microbatches, mode, costs, **chosen)
    except InputError as error:
        refused(error)
        return
    assert check_order(base).ok
    for found in (base, order):
        assert (found.devices, found.microbatches) == (devices, microbatches)
    assert order.placement == base.placement
    assert order_is_sound(order)
    assert program.order == without_idle(order)
    assert completes(program, lambda transfer: transfer.communicator)
    assert completes(program, lambda transfer: "")
    peaks = time_order(order, EQUAL_COSTS if costs is None else costs).peak_in_flight
    assert check_order(order).in_flight == check_program(program).in_flight == peaks
    evaluation = evaluation_program(order, costs)
    assert evaluation.forward_only and order_is_sound(evaluation.order)
    if not any(item.parts for device in range(devices) for item in order.passes(device)):
        drawn = random_costs(seed + 1, order.placement)
        passes_only = Costs(**{kind: getattr(drawn, kind) for kind in "FBIWSCTEG"})
        expected = end_times(order, PassTimes(passes_only, order.placement).of)
        timed = time_order(order, passes_only).events
        assert {(event.device, event.item): event.end for row in timed for event in row} == pytest.approx(expected)


def without_idle(order: Order) -> Order:
    rows = tuple(tuple(order.passes(device)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, order.vocabulary, order.forward_only)


def test_the_first_microbatches_of_an_evaluation_are_a_sound_program(sample: Callable[..., list[Any]]) -> None:
    for name, mode, devices in sample(product(SCHEDULES, MODES, (1, 3)), 16):
        whole = evaluation_program(plan_order(name, devices, 6, mode))
        for microbatches in range(1, 7):
            first = whole.of_the_first(microbatches)
            assert check_program(first).ok
            rows = tuple(tuple(item for item in row if item.microbatch < microbatches) for row in whole.rows)
            assert first.rows == rows
        assert whole.of_the_first(6) == whole


# --- from names to programs -------------------------------------------------------------------------------------------


def test_an_order_that_does_not_fit_into_memory_is_refused() -> None:
    for devices, microbatches, stages in ((4, 10**20, None), (10**12, 1, None), (100, 10**5, 1000)):
        with pytest.raises(InputError, match="forwards does not fit into memory; take at most 20000000"):
            generate("interleaved", devices, microbatches, stages_per_device=stages)


def test_an_option_that_is_none_is_left_at_its_default() -> None:
    assert generate("interleaved", 3, 4, stages_per_device=None, group_size=None) == generate("interleaved", 3, 4)
    assert generate("zb-auto", 3, 4, max_in_flight=None, weight_share=None) == generate("zb-auto", 3, 4)
    assert generate("1f1b", 3, 4, stages_per_device=None) == generate("1f1b", 3, 4)


def test_each_mode_is_its_transform() -> None:
    base = generate("1f1b", 3, 4)
    for costs in (None, Costs(F=[1, 2, 1], B=[2, 3, 3], S=1, T=1, E=0, G=0)):
        assert plan_order("1f1b", 3, 4, "first-last", costs) == base
        assert plan_order("1f1b", 3, 4, "redistribute", costs) == base
        assert plan_order("1f1b", 3, 4, "vocab-2", costs) == add_vocabulary(base, "vocab-2", costs)
        assert plan_order("1f1b", 3, 4, "vocab-1", costs) == add_vocabulary(base, "vocab-1", costs)
        assert plan_order("1f1b", 3, 4, "interlaced", costs) == interlace(base, costs)
        assert plan_order("1f1b", 3, 4, "balanced", costs) == plan_order("1f1b", 3, 4, costs=costs)
        assert plan_order("1f1b", 3, 4, "balanced", costs) == plan_order("1f1b", 3, 4, "vocab-2", costs)


def test_a_schedule_may_be_a_name_with_options_an_order_or_a_function() -> None:
    _, program = plan_program("interleaved", 2, 4, "vocab-1", stages_per_device=3)
    assert program.placement == Placement.looped(2, 3)
    order, program = plan_program("gpipe", 2, 3, "vocab-2")
    assert program.order == order
    assert plan_program(generate("gpipe", 2, 3), 2, 3, "vocab-2") == (order, program)
    assert plan_program(lambda *sizes: generate("gpipe", *sizes), 2, 3) == (order, program)
    assert plan_program(order, 2, 3, "vocab-2") == (order, program)


WRONG_SIZE = generate("1f1b", 3, 2)
BAD: list[tuple[tuple[Any, ...], str]] = [
    (("1f1", 2, 2), 'schedule is "1f1"; it must be one of gpipe, 1f1b'),
    (("", 2, 2), 'schedule is ""; it must be one of'),
    (("1f1b", 2, 2, "vocab2"), 'vocabulary is "vocab2"; it must be one of balanced, first-last, redistribute'),
    (("1f1b", 0, 2), "devices is 0; it must be a whole number of at least 1"),
    (("1f1b", 2, 0), "microbatches is 0; it must be a whole number of at least 1"),
    (("1f1b", 2, 2.0), "microbatches is 2.0; it must be a whole number of at least 1"),
    ((WRONG_SIZE, 2, 2), "the order is for 3 devices and 2 microbatches, not 2 and 2"),
    ((lambda devices, microbatches: WRONG_SIZE, 3, 1), "3 devices and 2 microbatches, not 3 and 1"),
    ((lambda devices, microbatches: None, 3, 1), "returned NoneType; expected an Order"),
    ((lambda: None, 2, 2), "schedule: <lambda>(devices, microbatches) cannot be called: too many positional"),
    ((add_vocabulary(WRONG_SIZE, "vocab-2"), 3, 2, "vocab-1"), "passes of vocab-2, not those of mode vocab-1"),
    ((add_vocabulary(WRONG_SIZE, "vocab-2"), 3, 2, "first-last"), "of vocab-2, not those of mode first-last"),
    ((Order.from_csv("0F0,0B0,0F1\n1F0,1B0,1F1"), 2, 2, "vocab-2"), "the schedule has 2 faults"),
    ((Order.from_csv("0F0\n1F0"), 2, 1), "the order only evaluates"),
    ((Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), 2, 2), "deadlock: device 0"),
]


def test_bad_input() -> None:
    for arguments, message in BAD:
        with pytest.raises(InputError) as error:
            plan_program(*arguments)
        assert message in str(error.value)


def test_options_of_a_schedule() -> None:
    with pytest.raises(InputError, match="schedule '1f1b' has no option 'group'; its options: none"):
        plan_program("1f1b", 2, 2, group=2)

    def grouped(devices: int, microbatches: int, *, costs: Costs | None = None, group: int = 1) -> Order:
        assert (costs, group) == (Costs(F=1, B=2), 2)
        return generate("1f1b", devices, microbatches)

    SCHEDULES["grouped"] = grouped
    try:
        assert registered("grouped", 2, 2, costs=Costs(F=1, B=2), group=2) == generate("1f1b", 2, 2)
        with pytest.raises(InputError, match="has no option 'groups'; its options: group"):
            registered("grouped", 2, 2, groups=2)
    finally:
        del SCHEDULES["grouped"]
