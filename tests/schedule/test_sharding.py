"""Passes added to an order: those that gather parameters and sum gradients over replicas, and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from text_tables import cases, order_of

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
    VocabularyMode,
    add_communication,
    add_recompute,
    add_sharding,
    check_order,
    check_program,
    evaluation_program,
    parts_of,
    plan_order,
    plan_program,
    without_sharding,
)
from evenpipe.schedule.passes import FREEING_KINDS, GATHERING_KINDS, REDUCING_KINDS
from evenpipe.schedule.sharding import ParameterUse, Part, part_of, parts_of_device


def text_of(order: Order | Program) -> str:
    return "|".join(" ".join(map(str, row)) for row in order.rows)


PLACED = """
0F0 0F1 0B0 0B1 ; {"gathers": false}
    0F0 0F1 0B0 0B1 0REDUCE_GRAD
0F0 0F1 0B0 0B1 ; {"gathers": true}
    0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD
0F0 0F1 0B0 0B1 ; {"gathers": true, "reshard": true}
    0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD
0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1 ; {"gathers": true}
    0UNSHARD 1UNSHARD 0F0 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD
0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1 ; {"gathers": true, "prefetch": 0}
    0UNSHARD 0F0 1UNSHARD 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD
0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1 ; {"gathers": true, "prefetch": 0, "reshard": true}
    0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0F1 0RESHARD
    1UNSHARD 1F1 1B1 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD
0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1 ; {"gathers": true, "reshard": true}
    0UNSHARD 1UNSHARD 0F0 1F0 1B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD
# The one matrix is used by both, and summed when both have added to it.
0F0 1F0 1B0 0B0 ; {"gathers": true, "tied": true}
    0UNSHARD UNSHARD_S 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD REDUCE_GRAD_S RESHARD_S
# Each has its own copy of the matrix.
0F0 0B0|1F0 1B0 ; {"gathers": false, "tied": true}
    0F0 0B0 0REDUCE_GRAD|1F0 1B0 1REDUCE_GRAD
# What is there stays.
0F0 0REDUCE_GRAD 0B0 ; {"gathers": true}
    0UNSHARD 0F0 0REDUCE_GRAD 0B0 0RESHARD
"""
"""Orders and options, and what becomes of them."""


def test_where_they_are_placed() -> None:
    for order, options, expected in cases(PLACED):
        assert text_of(add_sharding(order_of(order), **{"tied": False, **options})) == " ".join(expected)


def test_parts_of_the_vocabulary() -> None:
    order = order_of("E0 0F0 S0 C0 T0 0B0 G0|E0 1F0 S0 C0 1B0 T0 G0", vocabulary="vocab-2")
    gathered = {"gathers": True, "tied": False, "reshard": True, "prefetch": 0}
    for options, first in (
        ({"gathers": False, "tied": False}, "E0 0F0 S0 C0 T0 REDUCE_GRAD_S 0B0 0REDUCE_GRAD G0 REDUCE_GRAD_E"),
        ({"gathers": False, "tied": True}, "E0 0F0 S0 C0 T0 0B0 0REDUCE_GRAD G0 REDUCE_GRAD_S"),
        (
            gathered,
            "UNSHARD_E E0 RESHARD_E 0UNSHARD 0F0 0RESHARD UNSHARD_S S0 C0 T0 REDUCE_GRAD_S RESHARD_S "
            "0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD UNSHARD_E G0 REDUCE_GRAD_E RESHARD_E",
        ),
    ):
        assert text_of(add_sharding(order, **options)).split("|")[0] == first


def parts_there(placement: Placement, vocabulary: VocabularyMode, row: tuple[Item | None, ...]) -> Iterator[set[Part]]:
    """The parts that are gathered at each pass of a row."""
    users = ParameterUse.of_row(placement, vocabulary, row)
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


def test_every_schedule_is_sound_with_them_and_has_no_more_than_it_may(sample: Callable[..., list[Any]]) -> None:
    options = product((False, True), (None, 0, 1, 2), (False, True))
    for schedule, mode, (tied, prefetch, reshard) in sample(product(SCHEDULES, MODES, options), 40):
        order, program = plan_program(schedule, 2, 4, mode)
        for one in (program, evaluation_program(order)):
            found = add_sharding(one, gathers=True, tied=tied, reshard=reshard, prefetch=prefetch)
            check_program(found).raise_if_faulty()
            assert without_sharding(found) == without_sharding(one) == one
            for device, row in enumerate(found.rows):
                counts = [len(there) for there in parts_there(one.placement, one.vocabulary, row)]
                parts = parts_of_device(one.placement, one.vocabulary, device, tied=tied)
                most = (1 if prefetch is None else prefetch) + 1 if reshard else len(parts)
                joint = any(item.kind is Kind.OVERLAP_F_B for item in row if item)
                shared = Kind.S in parts and not one.vocabulary.sharded
                assert max(counts) <= max(most, 2 * joint, 2 * shared + joint)
                sums = [part_of(item) for item in row if item and item.kind in REDUCING_KINDS]
                assert sorted(sums, key=str) == sorted([] if one.forward_only else parts, key=str)


WHOLE, SHARDED = "first-last", "vocab-2"
# rows, vocabulary mode, faults
FAULTY = [
    ("0UNSHARD 0F0 0RESHARD 0B0", WHOLE, ["0B0 needs 0UNSHARD before it, and no RESHARD in between"]),
    ("0F0 0UNSHARD 0B0", WHOLE, ["0F0 needs 0UNSHARD before it"]),
    ("0UNSHARD 0UNSHARD 0F0 0B0", WHOLE, ["0UNSHARD gathers what is gathered already"]),
    ("0F0 0B0 0RESHARD", WHOLE, ["0RESHARD frees what is not gathered"]),
    ("0F0 0REDUCE_GRAD 0B0", WHOLE, ["0B0 adds to gradients that are summed before it, by 0REDUCE_GRAD at position 1"]),
    ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", WHOLE, ["0REDUCE_GRAD is already at position 2"]),
    ("0F0 0B0 0REDUCE_GRAD|1F0 1B0", WHOLE, ["1REDUCE_GRAD is missing, but others are summed"]),
    ("E0 0F0 S0 C0 T0 REDUCE_GRAD_S 0B0 0REDUCE_GRAD G0", SHARDED, ["G0 adds to gradients that are summed before it"]),
    ("E0 0F0 S0 C0 T0 0B0 G0 0REDUCE_GRAD REDUCE_GRAD_E", SHARDED, ["REDUCE_GRAD_S is missing, but others are summed"]),
    ("UNSHARD_S E0 0F0 RESHARD_S S0 C0 T0 0B0 G0", SHARDED, ["S0 needs UNSHARD_S"]),
    ("0UNSHARD 0F0 0B0 1RESHARD", WHOLE, ["1RESHARD names a stage that does not exist", "1RESHARD frees"]),
]


def test_faults() -> None:
    for rows, mode, expected in FAULTY:
        order = order_of(rows, vocabulary=mode, placement=Placement.linear(rows.count("|") + 1))
        found = [fault.message for fault in check_order(order).faults]
        assert all(any(what.startswith(start) for what in found) for start in expected), found
        assert check_order(without_sharding(order)).ok


def test_a_row_that_evaluates_sums_nothing() -> None:
    order = order_of("0UNSHARD 0F0 0RESHARD", forward_only=True)
    assert check_order(order).ok and add_sharding(order, gathers=True, tied=False) == order
    (fault,) = check_order(order_of("0F0 0REDUCE_GRAD", forward_only=True)).faults
    assert fault.message == "0REDUCE_GRAD is not allowed in an order that only evaluates"


# --- recomputation ----------------------------------------------------------------------------------------------------

RECOMPUTED = [
    # order, stages, with R
    ("0F0,0F1,0B0,0B1", None, "0F0,0F1,0R0,0B0,0R1,0B1"),
    ("0F0,0I0,0W0", None, "0F0,0R0,0I0,0W0"),
    ("0F0,1F0,1B0,0B0", (1,), "0F0,1F0,1R0,1B0,0B0"),
    ("0F0,1F0,1B0,0B0", (), "0F0,1F0,1B0,0B0"),
    ("0F0,0R0,0F1,0B0,0B1", None, "0F0,0R0,0F1,0B0,0R1,0B1"),
    ("0F0,,(0F1;0B0)OVERLAP_F_B,0B1", None, "0F0,,0R0,(0F1;0B0)OVERLAP_F_B,0R1,0B1"),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", None, "0F0,(0F1;0B1)OVERLAP_F_B,0R0,0B0"),
]


def test_recomputation_stands_right_before_each_backward_of_its_stages() -> None:
    for before, stages, after in RECOMPUTED:
        assert add_recompute(Order.from_csv(before), stages).to_csv().strip() == after
    for stage in (-1, 2):
        with pytest.raises(InputError, match=f"recompute has stage {stage}; each must be 0 to 1"):
            add_recompute(Order.from_csv("0F0,1F0,1B0,0B0"), [stage])


def test_every_schedule_stays_sound_with_recomputation(sample: Callable[..., list[Any]]) -> None:
    """Whether it is added before the vocabulary passes or after them."""
    for name, mode, (devices, microbatches) in sample(product(SCHEDULES, MODES, ((1, 3), (2, 3), (3, 5))), 12):
        plain = plan_order(name, devices, microbatches, mode)
        for stages in (None, [0], range(1, plain.placement.stages)):
            order = add_recompute(plain, stages)
            assert check_order(order).ok
            program = add_communication(order)
            assert check_program(program).ok
            assert add_recompute(order, stages) == order
            kinds = [part.kind for row in order.rows for item in row if item for part in parts_of(item)]
            chosen = plain.placement.stages if stages is None else len(stages)
            assert kinds.count(Kind.R) == chosen * microbatches
            assert not any(item.kind is Kind.R for row in evaluation_program(order).order.rows for item in row)
            base = add_recompute(plan_order(name, devices, microbatches, "first-last"), stages)
            again, _ = plan_program(base, devices, microbatches, mode)
            assert sum(item.kind is Kind.R for row in again.rows for item in row if item) == chosen * microbatches
