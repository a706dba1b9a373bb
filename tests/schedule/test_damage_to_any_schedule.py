"""Whatever is done to any schedule: a fault is found if and only if it did harm, as a second opinion sees it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from damage import TO_BOTH, TO_PROGRAMS, Damage, Rows
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_oracle import order_is_sound, program_is_sound, random_order

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    check_order,
    check_program,
    evaluation_program,
    plan_program,
)

PLACEMENTS = {
    "random, looped": lambda devices: Placement.looped(devices, 2),
    "random, in a V": Placement.v_shape,
    "random, on two branches": lambda devices: Placement(devices, (0, *range(devices), devices - 1, 0), fork(devices)),
}


def fork(devices: int) -> tuple[tuple[int, int], ...]:
    """Stage 0, a branch of as many stages as devices beside one of a single stage, and a last stage."""
    long = tuple((stage, stage + 1) for stage in range(devices))
    return (*long, (devices, devices + 2), (0, devices + 1), (devices + 1, devices + 2))


NAMES = [*SCHEDULES, *PLACEMENTS]


@cache
def sound(
    name: str, devices: int, microbatches: int, mode: str, *, evaluates: bool, slices: int
) -> tuple[Order, Program] | None:
    """None where the schedule is not made for this size."""
    schedule = name
    if name in PLACEMENTS:
        placement = PLACEMENTS[name](devices)
        schedule = random_order(devices, placement, microbatches, split=mode == "vocab-2", slices=slices)
    try:
        order, program = plan_program(schedule, devices, microbatches, mode, slices=slices)
    except InputError:
        return None
    if evaluates:
        program = evaluation_program(order)
        order = program.order
    assert order_is_sound(order)
    assert program_is_sound(program, program)
    return order, program


CASES = {
    "name": st.sampled_from(NAMES),
    "devices": st.integers(1, 4),
    "microbatches": st.integers(1, 4),
    "mode": st.sampled_from(MODES),
    "evaluates": st.booleans(),
    "slices": st.integers(1, 3),
    "seed": st.integers(0, 10**6),
}


def with_rows(schedule: Order | Program, rows: Rows) -> Order | Program:
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("damage", TO_BOTH, ids=lambda damage: damage.__name__)
@settings(max_examples=60, deadline=None)
@given(**CASES)
@pytest.mark.sampled(5)
def test_orders(damage: Damage, seed: int, **case: object) -> None:
    found = sound(**case)
    assume(found)
    rows = [list(row) for row in found[0].rows]
    damage(random.Random(seed), rows)
    damaged = with_rows(found[0], rows)
    assert check_order(damaged).ok == order_is_sound(damaged)


@pytest.mark.parametrize("damage", dict.fromkeys(TO_PROGRAMS), ids=lambda damage: damage.__name__)
@settings(max_examples=60, deadline=None)
@given(**CASES)
@pytest.mark.sampled(6)
def test_programs(damage: Damage, seed: int, **case: object) -> None:
    found = sound(**case)
    assume(found)
    rows = [list(row) for row in found[1].rows]
    damage(random.Random(seed), rows)
    damaged = with_rows(found[1], rows)
    assert check_program(damaged).ok == program_is_sound(damaged, found[1])


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_two_damages_are_both_named(seed: int, **case: object) -> None:
    """A pass that is missing on one device hides no pass that stands twice on another."""
    found = sound(**case)
    assume(found and found[0].devices > 1)
    order, rng = found[0], random.Random(seed)
    rows = [list(row) for row in order.rows]
    one, other = rng.sample(range(len(rows)), 2)
    assume(not any(item.parts for row in (rows[one], rows[other]) for item in row))
    missing = rows[one].pop(rng.randrange(len(rows[one])))
    twice = rng.choice(rows[other])
    rows[other].append(twice)
    faults = check_order(with_rows(order, rows)).faults
    assert any(fault.device == one and "is missing" in fault.what for fault in faults), missing
    assert any(fault.device == other and f"{twice} is already at position" in fault.what for fault in faults)


def test_every_damage_to_a_transfer_is_of_a_kind_that_was_tried() -> None:
    """The names of this file's table, so that a field added to transfers is not forgotten."""
    fields = set(Transfer.__dataclass_fields__)
    assert fields == {"kind", "stage", "microbatch", "slice", "members", "root", "communicator", "peer"}
    assert set(Pass.__dataclass_fields__) == {"kind", "stage", "microbatch", "slice", "parts"}
