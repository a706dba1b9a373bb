"""Any single damage to a sound order or program is found."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import (
    GRAPHS,
    Carried,
    ancestors,
    completes,
    edited,
    in_time,
    random_costs,
    random_order,
    same_transfer,
)

from evenpipe.schedule import (
    Item,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    add_communication,
    add_slices,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
)

PLACEMENTS = [
    Placement.linear(1),
    Placement.linear(2),
    Placement.linear(4),
    Placement.looped(3, 2),
    Placement.v_shape(2),
    *GRAPHS,
]
CASES = {
    "placement": st.sampled_from(PLACEMENTS),
    "microbatches": st.integers(1, 5),
    "seed": st.integers(0, 10**6),
    "mode": st.sampled_from(["none", "vocab-1", "vocab-2", "interlaced"]),
    "base": st.sampled_from(["gpipe", "1f1b", "random", "random and split"]),
    "evaluates": st.booleans(),
    "slices": st.integers(1, 2),
}
PROPERTY = settings(max_examples=100, deadline=None)


def sound(
    *, placement: Placement, microbatches: int, seed: int, mode: str, base: str, evaluates: bool, slices: int
) -> tuple[Order, Program, random.Random]:
    costs = random_costs(seed, placement)
    if base in {"gpipe", "1f1b"}:
        placement = Placement.linear(placement.devices)
        order = add_slices(generate(base, placement.devices, microbatches * slices), slices)
        costs = random_costs(seed, placement)
    else:
        order = random_order(seed, placement, microbatches, split="split" in base, slices=slices)
    if mode == "interlaced":
        order = interlace(order, costs)
    elif mode != "none":
        order = add_vocabulary(order, 1 if mode == "vocab-2" else 2, costs)
    order = forward_only(order, costs) if evaluates else order
    program = add_communication(order, costs)
    assert check_order(order).ok
    assert check_program(program).ok
    return order, program, random.Random(seed)


def with_row(order: Order, device: int, row: list[Pass]) -> Order:
    rows = tuple(tuple(row) if here == device else old for here, old in enumerate(order.rows))
    return replace(order, rows=rows)


def anywhere(rng: random.Random, rows: tuple[tuple[Item | None, ...], ...]) -> tuple[int, int, list[Item | None]]:
    """A device, a position in its row, and the row."""
    device = rng.randrange(len(rows))
    return device, rng.randrange(len(rows[device])), list(rows[device])


@PROPERTY
@given(**CASES)
def test_a_dropped_pass_is_found(**case: object) -> None:
    order, program, rng = sound(**case)
    device, position, row = anywhere(rng, order.rows)
    item = row.pop(position)
    faults = check_order(with_row(order, device, row)).faults
    assert (device, None) in {(fault.device, fault.position) for fault in faults}
    assert any(str(item) in fault.what or str(item).replace("I", "B") in fault.what for fault in faults)
    assert not check_program(edited(program, device, [old for old in program.rows[device] if old != item])).ok


@PROPERTY
@given(**CASES)
def test_a_repeated_pass_is_found(**case: object) -> None:
    order, program, rng = sound(**case)
    device, position, row = anywhere(rng, order.rows)
    item, place = row[position], rng.randint(0, len(row))
    row.insert(place, item)
    faults = check_order(with_row(order, device, row)).faults
    assert any(fault.device == device and f"{item} is already at position" in fault.what for fault in faults)
    longer = list(program.rows[device])
    longer.insert(rng.randint(0, len(longer)), item)
    assert not check_program(edited(program, device, longer)).ok


@PROPERTY
@given(**CASES)
def test_passes_in_the_wrong_order_are_found(**case: object) -> None:
    """Two passes of a device change places, of which one needs the other, if only by way of other devices."""
    order, program, rng = sound(**case)
    closure = ancestors(order)
    pairs = [
        (device, earlier, later)
        for device in range(order.devices)
        for later in order.passes(device)
        for there, earlier in closure[device, later]
        if there == device
    ]
    if not pairs:  # One device and one microbatch of forwards.
        return
    device, earlier, later = rng.choice(sorted(pairs, key=str))

    def exchanged(row: tuple[Item | None, ...]) -> list[Item | None]:
        return [later if item == earlier else earlier if item == later else item for item in row]

    assert not check_order(with_row(order, device, exchanged(order.rows[device]))).ok
    assert not check_program(edited(program, device, exchanged(program.rows[device]))).ok


@PROPERTY
@given(**CASES)
def test_a_pass_on_the_wrong_device_is_found(**case: object) -> None:
    order, program, rng = sound(**case)
    if order.devices == 1:
        return
    device, position, row = anywhere(rng, order.rows)
    item = row.pop(position)
    other = rng.choice([there for there in range(order.devices) if there != device])
    longer = list(order.rows[other])
    longer.insert(rng.randint(0, len(longer)), item)
    faults = check_order(with_row(with_row(order, device, row), other, longer)).faults
    assert {device, other} <= {fault.device for fault in faults}
    shorter = [old for old in program.rows[device] if old != item]
    longer = [*program.rows[other], item]
    assert not check_program(edited(edited(program, device, shorter), other, longer)).ok


def transfers(program: Program) -> list[tuple[int, int, Transfer]]:
    return [
        (device, position, item)
        for device, row in enumerate(program.rows)
        for position, item in enumerate(row)
        if isinstance(item, Transfer)
    ]


@PROPERTY
@given(**CASES)
def test_a_dropped_or_repeated_transfer_is_found(**case: object) -> None:
    _, program, rng = sound(**case)
    for device, position, item in rng.sample(transfers(program), min(2, len(transfers(program)))):
        row = list(program.rows[device])
        del row[position]
        assert not check_program(edited(program, device, row)).ok
        row = list(program.rows[device])
        row.insert(rng.randint(0, len(row)), item)
        assert not check_program(edited(program, device, row)).ok


@PROPERTY
@given(**CASES)
def test_transfers_of_one_communicator_in_another_order_are_found(**case: object) -> None:
    _, program, rng = sound(**case)
    pairs = [
        (device, one, other)
        for device, one, item in transfers(program)
        for there, other, later in transfers(program)
        if device == there and one < other and item.communicator == later.communicator
    ]
    for device, one, other in rng.sample(pairs, min(3, len(pairs))):
        row = list(program.rows[device])
        row[one], row[other] = row[other], row[one]
        assert not check_program(edited(program, device, row)).ok


@PROPERTY
@given(**CASES)
def test_a_moved_transfer_is_found_if_and_only_if_it_does_harm(**case: object) -> None:
    """Harm: it carries what is not there yet, it comes too late, two members disagree, or devices stand still."""
    _, program, rng = sound(**case)
    if not transfers(program):
        return
    device, position, item = rng.choice(transfers(program))
    row = list(program.rows[device])
    row.insert(rng.randrange(len(row)), row.pop(position))
    moved = edited(program, device, row)
    queues = (lambda transfer: transfer.communicator, lambda transfer: "")
    harmless = (
        in_time(moved, device, item)
        and all(completes(moved, queue) for queue in queues)
        and issued(moved, device, item.communicator) == issued(program, device, item.communicator)
    )
    assert check_program(moved).ok == harmless


def issued(program: Program, device: int, communicator: str) -> list[Carried]:
    row = [item for item in program.rows[device] if isinstance(item, Transfer)]
    return [same_transfer(item, program.placement) for item in row if item.communicator == communicator]
