"""Whatever is done to any schedule: a fault is found if and only if it did harm, as a second opinion sees it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_oracle import order_is_sound, program_is_sound, random_order

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    Item,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    TransferKind,
    check_order,
    check_program,
    evaluation_program,
    parts_of,
    plan_program,
)
from evenpipe.schedule.passes import JOINT_KINDS

Rows = list[list[Item]]

PLACEMENTS = {
    "random, looped": lambda devices: Placement.looped(devices, 2),
    "random, in a V": Placement.v_shape,
}
NAMES = [*SCHEDULES, *PLACEMENTS]


@cache
def sound(name: str, devices: int, microbatches: int, mode: str, evaluates: bool) -> tuple[Order, Program] | None:
    """None where the schedule is not made for this size."""
    schedule = name
    if name in PLACEMENTS:
        schedule = random_order(devices, PLACEMENTS[name](devices), microbatches, split=mode == "vocab-2")
    try:
        order, program = plan_program(schedule, devices, microbatches, mode)
    except InputError:
        return None
    if evaluates:
        program = evaluation_program(order)
        order = program.order
    assert order_is_sound(order)
    assert program_is_sound(program, program)
    return order, program


# What is done to rows, at places that `rng` chooses.


def somewhere(rng: random.Random, rows: Rows) -> tuple[list[Item], int]:
    row = rng.choice([row for row in rows if row])
    return row, rng.randrange(len(row))


def drop(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    del row[position]


def repeat(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    row.insert(rng.randint(0, len(row)), row[position])


def swap(rng: random.Random, rows: Rows) -> None:
    row, one = somewhere(rng, rows)
    other = rng.randrange(len(row))
    row[one], row[other] = row[other], row[one]


def swap_neighbours(rng: random.Random, rows: Rows) -> None:
    row, one = somewhere(rng, rows)
    other = max(0, one - 1)
    row[one], row[other] = row[other], row[one]


def move(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    item = row.pop(position)
    row.insert(rng.randint(0, len(row)), item)


def move_to_another_device(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    item, other = row.pop(position), rng.choice(rows)
    other.insert(rng.randint(0, len(other)), item)


def exchange_rows(rng: random.Random, rows: Rows) -> None:
    one, other = rng.randrange(len(rows)), rng.randrange(len(rows))
    rows[one], rows[other] = rows[other], rows[one]


def joinable(items: list[Item]) -> list[Pass]:
    """The passes and parts of these items, if all may stand in a joint pass."""
    parts = [part for item in items if isinstance(item, Pass) for part in parts_of(item)]
    return parts if all(isinstance(item, Pass) for item in items) and {p.kind for p in parts} <= JOINT_KINDS else []


def join_neighbours(rng: random.Random, rows: Rows) -> None:
    """In either turn; which is no damage where neither needs the other. Where nobody can be joined, nothing is done."""
    places = [(row, at) for row in rows for at in range(len(row) - 1) if joinable(row[at : at + 2])]
    for row, at in places and [rng.choice(places)]:
        parts = joinable(row[at : at + 2])
        row[at : at + 2] = [Pass(Kind.OVERLAP_F_B, parts=tuple(rng.sample(parts, len(parts))))]


def repeat_within_a_joint_pass(rng: random.Random, rows: Rows) -> None:
    row, at = rng.choice([(row, at) for row in rows for at in range(len(row)) if joinable(row[at : at + 1])])
    parts = joinable(row[at : at + 1])
    row[at] = Pass(Kind.OVERLAP_F_B, parts=(*parts, rng.choice(parts)))


def cut_off(rng: random.Random, rows: Rows) -> None:
    row, position = somewhere(rng, rows)
    del row[position:]


def changed(rng: random.Random, rows: Rows, **change: Callable[[Item], object]) -> None:
    """Another field for some pass or transfer that has such a field."""
    places = [
        (row, position)
        for row in rows
        for position, item in enumerate(row)
        if all(hasattr(item, name) and getattr(item, name) is not None for name in change)
        and not getattr(item, "parts", ())
    ]
    assume(places)
    row, position = rng.choice(places)
    row[position] = replace(row[position], **{name: make(row[position]) for name, make in change.items()})


def change_microbatch(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, microbatch=lambda item: item.microbatch + rng.choice([-1, 1, 10**6]))


def change_stage(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, stage=lambda item: item.stage + rng.choice([-1, 1, 10**6]))


def change_slice(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, slice=lambda item: 1)


def change_kind(rng: random.Random, rows: Rows) -> None:
    def other(item: Item) -> Kind | TransferKind:
        return rng.choice([kind for kind in type(item.kind) if kind is not item.kind])

    changed(rng, rows, kind=other)


def change_members(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, members=lambda item: rng.choice([item.members[::-1], item.members[1:], (7, *item.members)]))


def change_root(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, root=lambda item: item.root + 1)


def change_communicator(rng: random.Random, rows: Rows) -> None:
    changed(rng, rows, communicator=lambda item: item.communicator + "'")


TO_BOTH = [
    *(drop, repeat, swap, swap_neighbours, move, move_to_another_device, exchange_rows, cut_off),
    *(join_neighbours, repeat_within_a_joint_pass),
    *(change_microbatch, change_stage, change_slice, change_kind),
]
TO_PROGRAMS = [*TO_BOTH, swap_neighbours, move, change_members, change_root, change_communicator]
CASES = {
    "name": st.sampled_from(NAMES),
    "devices": st.integers(1, 4),
    "microbatches": st.integers(1, 4),
    "mode": st.sampled_from(MODES),
    "evaluates": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def with_rows(schedule: Order | Program, rows: Rows) -> Order | Program:
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("damage", TO_BOTH, ids=lambda damage: damage.__name__)
@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_orders(damage: Callable[[random.Random, Rows], None], seed: int, **case: object) -> None:
    found = sound(**case)
    assume(found)
    rows = [list(row) for row in found[0].rows]
    damage(random.Random(seed), rows)
    damaged = with_rows(found[0], rows)
    assert check_order(damaged).ok == order_is_sound(damaged)


@pytest.mark.parametrize("damage", dict.fromkeys(TO_PROGRAMS), ids=lambda damage: damage.__name__)
@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_programs(damage: Callable[[random.Random, Rows], None], seed: int, **case: object) -> None:
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
    assert any(fault.device == other and f"{twice} stands at position" in fault.what for fault in faults)


def test_every_damage_to_a_transfer_is_of_a_kind_that_was_tried() -> None:
    """The names of this file's table, so that a field added to transfers is not forgotten."""
    fields = set(Transfer.__dataclass_fields__) - {"bytes"}
    assert fields == {"kind", "stage", "microbatch", "slice", "members", "root", "communicator"}
    assert set(Pass.__dataclass_fields__) == {"kind", "stage", "microbatch", "slice", "parts"}
