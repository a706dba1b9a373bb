"""Every registered schedule, in every mode, at random sizes and costs: sound, or refused with a reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import completes, end_times, order_is_sound, random_costs

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    SCHEDULES,
    Costs,
    DeadlockError,
    Order,
    Transfer,
    check_order,
    check_program,
    evaluation_program,
    generate,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.registry import options_of
from evenpipe.schedule.transforms.communication import Lowering

OPTIONS = {
    "stages_per_device": lambda rng, devices: rng.randint(1, 3),
    "group_size": lambda rng, devices: rng.randint(1, 2 * devices),
    "memory_limit": lambda rng, devices: rng.choice([rng.uniform(1, 3 * devices), devices, 2.0 * devices]),
}
"""Values for the options that several families have; others stay at their defaults."""

CASES = {
    "devices": st.integers(1, 7),
    "microbatches": st.integers(1, 12),
    "mode": st.sampled_from(MODES),
    "seed": st.integers(0, 10**6),
}


def options(name: str, devices: int, rng: random.Random) -> dict[str, Any]:
    known = [option for option in options_of(name) if option in OPTIONS]
    return {option: OPTIONS[option](rng, devices) for option in known if rng.random() < 0.6}


def refused(error: InputError) -> None:
    """A refusal says in one sentence what the schedule needs; it is not the checker that stops what was made."""
    assert not isinstance(error, DeadlockError)
    assert "fault" not in str(error)
    assert str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30, deadline=None)
@given(**CASES)
@pytest.mark.sampled(6)
def test_is_sound_in_every_mode_or_refused(name: str, devices: int, microbatches: int, mode: str, seed: int) -> None:
    rng = random.Random(seed)
    chosen = options(name, devices, rng)
    try:
        base = generate(name, devices, microbatches, **chosen)
        costs = rng.choice([None, random_costs(seed, base.placement)])
        order, program = plan_program(name, devices, microbatches, mode, costs, **chosen)
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
    assert evaluation.forward_only
    assert order_is_sound(evaluation.order)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=10, deadline=None)
@given(**CASES)
def test_is_timed_as_the_second_opinion_times_it(
    name: str, devices: int, microbatches: int, mode: str, seed: int
) -> None:
    try:
        base = generate(name, devices, microbatches)
        costs = random_costs(seed, base.placement)
        costs = Costs(**{kind: getattr(costs, kind) for kind in "FBIWSCTEG"})  # It knows no transfer times.
        order, _ = plan_program(name, devices, microbatches, mode, costs)
    except InputError as error:
        refused(error)
        return
    if any(item.parts for device in range(devices) for item in order.passes(device)):
        return
    expected = end_times(order, PassTimes(costs, order.placement).of)
    found = {(event.device, event.item): event.end for row in time_order(order, costs).events for event in row}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
def test_a_single_device_is_lowered_as_in_the_whole_program(name: str, mode: str) -> None:
    try:
        order, program = plan_program(name, 4, 6, mode)
    except InputError as error:
        refused(error)
        return
    lowering = Lowering(order)
    assert [lowering.row(device) for device in (2, 0, 3, 1)] == [program.rows[device] for device in (2, 0, 3, 1)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_device_has_no_transfers(name: str) -> None:
    for mode in MODES:
        try:
            _, program = plan_program(name, 1, 3, mode)
        except InputError as error:
            refused(error)
            continue
        assert not any(isinstance(item, Transfer) for item in program.rows[0])


def without_idle(order: Order) -> Order:
    rows = tuple(tuple(order.passes(device)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, order.barriers, order.forward_only)
