"""Transfers: where they stand in a program, over which communicators, and when memory is free.

That programs complete, and who waits for whom, is compared with second opinions in `test_agreement`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import unit_needs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_times, random_costs, random_order
from text_tables import order_of

from evenpipe.schedule import (
    EQUAL_COSTS,
    SHARING,
    Costs,
    Pass,
    Placement,
    Rules,
    Transfer,
    add_communication,
    add_vocabulary,
    plan_order,
    plan_program,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.releases import releases

Sample = Callable[..., list[Any]]

# --- where transfers stand --------------------------------------------------------------------------------------------

PLACED = [
    # order, vocabulary mode, costs, program
    (
        "0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1",
        "",
        Costs(F=1, B=2),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1|"
        # 0F1 ends at 2, as 1F0 does: the receive is issued before 1F0.
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ),
    (
        # Issued when its data is ready, not when it has arrived: 0F1 ends at 4 and its data is there at 6;
        # 1F0 runs from 4 to 5. 1B1 ends at 10; 0B0 runs from 9 to 11.
        "0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1",
        "",
        Costs(F=[2, 1], B=2, p2p=2),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1|1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ),
    (
        # T0 runs when dX is ready, and the gradient is on its way to device 0 before it has run.
        "0F0,0B0|1F0,1B0",
        "vocab-2",
        Costs(F=1, B=2, S=0.4, C=0.1, T=0.4, E=0.1, G=0.1),
        "E0 ROWS0 0F0 0SEND_F0 X0 S0 STATISTICS0 C0 DX0 T0 0RECV_B0 0B0 ROW_GRADIENTS0 G0|"
        "E0 ROWS0 1RECV_F0 1F0 X0 S0 STATISTICS0 C0 DX0 1B0 1SEND_B0 T0 ROW_GRADIENTS0 G0",
    ),
    (
        "0F0,0F0.1,0B0.1,0B0|1F0,1F0.1,1B0.1,1B0",
        "",
        EQUAL_COSTS,
        "0F0 0SEND_F0 0F0.1 0SEND_F0.1 0RECV_B0.1 0RECV_B0 0B0.1 0B0|"
        "1RECV_F0 1RECV_F0.1 1F0 1F0.1 1B0.1 1SEND_B0.1 1B0 1SEND_B0",
    ),
]


def test_small_programs_in_full() -> None:
    for text, mode, costs, expected in PLACED:
        order = order_of(text)
        program = add_communication(add_vocabulary(order, mode) if mode else order, costs)
        assert "|".join(" ".join(map(str, row)) for row in program.rows) == expected


@settings(max_examples=60)
@given(
    placement=st.sampled_from(
        [Placement.linear(2), Placement.linear(4), Placement.looped(2, 2), Placement.looped(3, 2), Placement.v_shape(3)]
    ),
    microbatches=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["none", "interlaced", "vocab-1", "vocab-2"]),
    split=st.booleans(),
)
def test_a_transfer_stands_at_one_instant_on_all_its_members(
    placement: Placement, microbatches: int, seed: int, mode: str, split: bool
) -> None:
    """After every pass that is predicted to end before its last producer does, before every one that ends later."""
    order, costs = random_order(seed, placement, microbatches, split=split), random_costs(seed, placement)
    if mode != "none":
        order = plan_order(order, order.devices, microbatches, mode, costs)
    costs = Costs(**{name: getattr(costs, name) for name in "FBIWSCTEG"})
    program, rules = add_communication(order, costs), Rules.of(order)
    ends = end_times(order, PassTimes(costs, order.placement).of)
    for device, row in enumerate(program.rows):
        for position, item in enumerate(row):
            if not isinstance(item, Transfer):
                continue
            producers = [
                (there, producer if (there, producer) in ends else Pass.parse(str(producer).replace("B", "I")))
                for there, producer in unit_needs.producers(rules, item, device)
            ]
            instant = max(ends[producer] for producer in producers)
            assert all(ends[device, other] <= instant for other in row[:position] if isinstance(other, Pass))
            assert all(ends[device, other] >= instant for other in row[position:] if isinstance(other, Pass))


# --- communicators ----------------------------------------------------------------------------------------------------

HOW_MANY = [
    # devices, schedule, mode, (per-pair, per-kind, one)
    (1, "1f1b", "vocab-2", (0, 0, 0)),
    (2, "1f1b", "first-last", (2, 2, 1)),
    (4, "1f1b", "first-last", (6, 2, 1)),
    (4, "1f1b", "vocab-2", (10, 4, 1)),
    (4, "interleaved", "vocab-1", (12, 4, 1)),  # round the ring
    (4, "zbv", "first-last", (12, 2, 1)),  # there and back, each for F and B
    (8, "zbv", "vocab-2", (32, 4, 1)),
]


def test_how_many_there_are() -> None:
    for devices, schedule, mode, counts in HOW_MANY:
        programs = [plan_program(schedule, devices, 3, mode, sharing=sharing)[1] for sharing in SHARING]
        assert tuple(len(program.communicators) for program in programs) == counts
        assert programs[-1].communicators == ({"ALL": tuple(range(devices))} if devices > 1 else {})


# --- memory of what is received and sent ------------------------------------------------------------------------------


RELEASED = [
    # schedule, devices, microbatches, device: after which pass what has arrived
    ("1f1b", 2, 2, 0, {"0B0": "0SEND_F0", "0B1": "0SEND_F1"}),
    ("1f1b", 2, 3, 1, {"1F2": "1SEND_B0"}),
    ("gpipe", 2, 3, 1, {}),  # device 0 sends nothing any more once it has gradients
    ("gpipe", 2, 3, 0, {"0B0": "0SEND_F0 0SEND_F1 0SEND_F2"}),
]


def test_what_was_sent_is_given_back_once_it_must_have_arrived() -> None:
    """That it is never too early is compared with a second opinion in `test_agreement`."""
    for schedule, devices, microbatches, device, expected in RELEASED:
        _, program = plan_program(schedule, devices, microbatches, "first-last")
        row, given_back = program.rows[device], releases(program, device)
        assert {str(row[place]): " ".join(map(str, sent)) for place, sent in given_back.items()} == expected


def test_a_long_step_holds_no_more_than_a_short_one() -> None:
    """1F1B: forwards are known to have arrived by their gradients, gradients by later forwards."""
    for microbatches in (8, 40):
        _, program = plan_program("1f1b", 4, microbatches, "first-last")
        for device, row in enumerate(program.rows):
            back, held = releases(program, device), 0
            for position, item in enumerate(row):
                held += isinstance(item, Transfer) and item.kind.value.startswith("SEND")
                assert held <= 4
                held -= len(back.get(position, ()))
