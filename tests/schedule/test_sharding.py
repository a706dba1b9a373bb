"""Passes that gather parameters and sum gradients over replicas: where they are placed, what the checker accepts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    add_sharding,
    check_order,
    check_program,
    evaluation_program,
    plan_program,
    without_sharding,
)
from evenpipe.schedule.passes import FREEING_KINDS, GATHERING_KINDS, REDUCING_KINDS, SHARDING_KINDS
from evenpipe.schedule.sharding import Part, Users, part_of, parts_of_device

ONE = "0F0 0F1 0B0 0B1"
TWO = "0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1"


def order_of(text: str, barriers: int = 0, **given: object) -> Order:
    return Order.from_csv("\n".join(",".join(row.split()) for row in text.split("|")), barriers=barriers, **given)


def text_of(order: Order | Program) -> str:
    return "|".join(" ".join(map(str, row)) for row in order.rows)


# order, options, what becomes of it
PLACED = [
    (ONE, {"gathers": False}, "0F0 0F1 0B0 0B1 0REDUCE_GRAD"),
    (ONE, {"gathers": True}, "0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD"),
    (ONE, {"gathers": True, "reshard": True}, "0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD"),
    (
        TWO,
        {"gathers": True},
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
    ),
    (
        TWO,
        {"gathers": True, "prefetch": 0},
        "0UNSHARD 0F0 1UNSHARD 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
    ),
    (
        TWO,
        {"gathers": True, "prefetch": 0, "reshard": True},
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0F1 0RESHARD 1UNSHARD 1F1 1B1 1REDUCE_GRAD 1RESHARD "
        "0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
    ),
    (
        TWO,
        {"gathers": True, "reshard": True},
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
    ),
    (
        "0F0 1F0 1B0 0B0",
        {"gathers": True, "tied": True},  # the one matrix is used by both, and summed when both have added to it
        "0UNSHARD UNSHARD_S 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD "
        "0B0 0REDUCE_GRAD 0RESHARD REDUCE_GRAD_S RESHARD_S",
    ),
    (
        "0F0 0B0|1F0 1B0",
        {"gathers": False, "tied": True},  # each has its own copy of the matrix
        "0F0 0B0 0REDUCE_GRAD|1F0 1B0 1REDUCE_GRAD",
    ),
    ("0F0 0REDUCE_GRAD 0B0", {"gathers": True}, "0UNSHARD 0F0 0REDUCE_GRAD 0B0 0RESHARD"),  # what is there stays
]
VOCABULARY = "E0 0F0 S0 C0 T0 0B0 G0|E0 1F0 S0 C0 1B0 T0 G0"


@pytest.mark.parametrize(("order", "options", "expected"), PLACED)
def test_where_they_are_placed(order: str, options: dict[str, object], expected: str) -> None:
    found = add_sharding(order_of(order), **{"tied": False, **options})
    assert text_of(found).split() == expected.split()


def test_parts_of_the_vocabulary() -> None:
    order = order_of(VOCABULARY, barriers=1)
    assert text_of(add_sharding(order, gathers=False, tied=False)).split("|")[0] == (
        "E0 0F0 S0 C0 T0 REDUCE_GRAD_S 0B0 0REDUCE_GRAD G0 REDUCE_GRAD_E"
    )
    assert text_of(add_sharding(order, gathers=False, tied=True)).split("|")[0] == (
        "E0 0F0 S0 C0 T0 0B0 0REDUCE_GRAD G0 REDUCE_GRAD_S"
    )
    assert text_of(add_sharding(order, gathers=True, tied=False, reshard=True, prefetch=0)).split("|")[0] == (
        "UNSHARD_E E0 RESHARD_E 0UNSHARD 0F0 0RESHARD UNSHARD_S S0 C0 T0 REDUCE_GRAD_S RESHARD_S "
        "0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD UNSHARD_E G0 REDUCE_GRAD_E RESHARD_E"
    )


def parts_there(placement: Placement, barriers: int, row: tuple[Item | None, ...]) -> Iterator[set[Part]]:
    """The parts that are gathered at each pass of a row."""
    users = Users.of_row(placement, barriers, row)
    gathered: set[Part] = set()
    for item in row:
        if isinstance(item, Pass):
            if item.kind in GATHERING_KINDS:
                gathered.add(part_of(item))
            elif item.kind in FREEING_KINDS:
                gathered.remove(part_of(item))
            assert gathered.issuperset(users.parts(item))
            yield set(gathered)
    assert not gathered


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_sound_with_them_and_has_no_more_than_it_may(schedule: str) -> None:
    for mode in MODES:
        for tied in (False, True):
            try:
                order, program = plan_program(schedule, 2, 4, mode)
            except InputError:  # not made for this size
                continue
            for one in (program, evaluation_program(order)):
                for prefetch in (None, 0, 1, 2):
                    for reshard in (False, True):
                        found = add_sharding(one, gathers=True, tied=tied, reshard=reshard, prefetch=prefetch)
                        check_program(found).raise_if_faulty()
                        assert without_sharding(found) == without_sharding(one) == one
                        for device, row in enumerate(found.rows):
                            counts = [len(there) for there in parts_there(one.placement, one.barriers, row)]
                            parts = parts_of_device(one.placement, one.barriers, device, tied=tied)
                            most = (1 if prefetch is None else prefetch) + 1 if reshard else len(parts)
                            joint = any(item.kind is Kind.OVERLAP_F_B for item in row if item)
                            shared = Kind.S in parts and not one.barriers
                            assert max(counts) <= max(most, 2 * joint, 2 * shared + joint)
                            sums = [part_of(item) for item in row if item and item.kind in REDUCING_KINDS]
                            assert sorted(sums, key=str) == sorted([] if one.forward_only else parts, key=str)


# rows, barriers, faults
FAULTY = [
    ("0UNSHARD 0F0 0RESHARD 0B0", 0, ["0B0 needs 0UNSHARD before it, and no RESHARD in between"]),
    ("0F0 0UNSHARD 0B0", 0, ["0F0 needs 0UNSHARD before it"]),
    ("0UNSHARD 0UNSHARD 0F0 0B0", 0, ["0UNSHARD gathers what is gathered already"]),
    ("0F0 0B0 0RESHARD", 0, ["0RESHARD frees what is not gathered"]),
    ("0F0 0REDUCE_GRAD 0B0", 0, ["0B0 adds to gradients that are summed before it, by 0REDUCE_GRAD at position 1"]),
    ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", 0, ["0REDUCE_GRAD is already at position 2"]),
    ("0F0 0B0 0REDUCE_GRAD|1F0 1B0", 0, ["1REDUCE_GRAD is missing, but others are summed"]),
    ("E0 0F0 S0 C0 T0 REDUCE_GRAD_S 0B0 0REDUCE_GRAD G0", 1, ["G0 adds to gradients that are summed before it"]),
    ("E0 0F0 S0 C0 T0 0B0 G0 0REDUCE_GRAD REDUCE_GRAD_E", 1, ["REDUCE_GRAD_S is missing, but others are summed"]),
    ("UNSHARD_S E0 0F0 RESHARD_S S0 C0 T0 0B0 G0", 1, ["S0 needs UNSHARD_S"]),
    ("0UNSHARD 0F0 0B0 1RESHARD", 0, ["1RESHARD names a stage that does not exist", "1RESHARD frees"]),
]


@pytest.mark.parametrize(("rows", "barriers", "faults"), FAULTY)
def test_faults(rows: str, barriers: int, faults: list[str]) -> None:
    placement = Placement.linear(rows.count("|") + 1)
    order = order_of(rows, barriers, placement=placement)
    found = [fault.what for fault in check_order(order).faults]
    assert len(found) >= len(faults)
    assert all(any(what.startswith(start) for what in found) for start in faults), found
    assert check_order(without_sharding(order)).ok


def test_a_row_that_evaluates_sums_nothing() -> None:
    order = order_of("0UNSHARD 0F0 0RESHARD", forward_only=True)
    assert check_order(order).ok
    assert add_sharding(order, gathers=True, tied=False) == order
    faulty = order_of("0F0 0REDUCE_GRAD", forward_only=True)
    assert [fault.what for fault in check_order(faulty).faults] == [
        "0REDUCE_GRAD is not allowed in an order that only evaluates"
    ]


def test_every_kind_has_a_part() -> None:
    for kind in SHARDING_KINDS:
        stage = 3 if kind in {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD} else None
        item = Pass(kind, stage)
        assert Pass.parse(str(item)) == item
        assert part_of(item) in {3, Kind.E, Kind.S}
