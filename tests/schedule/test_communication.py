"""Transfers: who waits for whom, where they stand in a program, over which communicators, and when memory is free.

That programs complete is compared with second opinions in `test_agreement` and `test_planning`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import unit_needs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_times, needs, random_costs, random_order

from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    SCHEDULES,
    SHARING,
    Costs,
    DeadlockError,
    Dependencies,
    Kind,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    TransferKind,
    add_communication,
    add_vocabulary,
    check_program,
    forward_only,
    generate,
    interlace,
    parts_of,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.releases import releases

Sample = Callable[..., list[Any]]

# --- who waits for whom -----------------------------------------------------------------------------------------------


def orders() -> list[Order]:
    result = []
    for placement in (Placement.linear(1), Placement.linear(3), Placement.looped(2, 2), Placement.v_shape(3)):
        for split in (False, True):
            base = random_order(3, placement, 3, split=split)
            result += [base, add_vocabulary(base, 1), add_vocabulary(base, 2), interlace(base)]
    result += [forward_only(order) for order in result]
    return [*result, generate("gpipe", 4, 5), add_vocabulary(generate("1f1b", 4, 5), 1)]


def test_needs_are_those_of_the_rules_and_what_is_fed_is_awaited() -> None:
    """Following local needs and the producers of awaited transfers gives exactly the needs of the second opinion."""
    for order in orders():
        dependencies = Dependencies.of(order)
        everything = {(device, item) for device in range(order.devices) for item in order.passes(device)}
        fed, awaited = set(), set()

        def present(device: int, item: Pass, everything: set[tuple[int, Pass]] = everything) -> tuple[int, Pass]:
            split = Pass.parse(str(item).replace("B", "I"))
            return (device, item) if (device, item) in everything else (device, split)

        for (device, item), expected in needs(order).items():
            found = {present(device, earlier) for earlier in unit_needs.after(dependencies, item, device)}
            for transfer in unit_needs.waits_for(dependencies, item, device):
                found |= {present(*producer) for producer in unit_needs.producers(dependencies, transfer, device)}
                awaited.add((dependencies.route_of(transfer, device), transfer.microbatch))
            assert found == set(expected)
            for transfer in unit_needs.feeds(dependencies, item, device):
                fed.add((dependencies.route_of(transfer, device), transfer.microbatch))
        assert fed == awaited == {(route, i) for route in dependencies.routes for i in range(order.microbatches)}


def test_passes_run_as_one_need_and_give_what_their_parts_do() -> None:
    dependencies = Dependencies(Placement.linear(3))
    both = Pass.parse("(1F1;1B0)OVERLAP_F_B")
    assert list(map(str, unit_needs.waits_for(dependencies, both, 1))) == ["1RECV_F1", "1RECV_B0"]
    assert list(map(str, unit_needs.feeds(dependencies, both, 1))) == ["1SEND_F1", "1SEND_B0"]


def test_transfers_say_who_takes_part() -> None:
    dependencies = Dependencies(Placement.linear(3), 1)
    found = {
        str(transfer): (transfer.members, transfer.root, transfer.communicator)
        for route in dependencies.routes
        for transfer in [route.transfer(route.members[0], 0)]
    }
    everyone = (0, 1, 2)
    assert found == {
        "0SEND_F0": ((0, 1), None, "F:0>1"),
        "1SEND_F0": ((1, 2), None, "F:1>2"),
        "1SEND_B0": ((1, 0), None, "B:1>0"),
        "2SEND_B0": ((2, 1), None, "B:2>1"),
        "ROWS0": (everyone, 0, "ROWS"),
        "X0": (everyone, 2, "X"),
        "STATISTICS0": (everyone, None, "STATISTICS"),
        "DX0": (everyone, 2, "DX"),
        "ROW_GRADIENTS0": (everyone, 0, "ROWS"),
    }


def test_the_two_ends_of_a_hop() -> None:
    dependencies = Dependencies(Placement.linear(3))
    (sent,) = unit_needs.feeds(dependencies, Pass.parse("1F4"), 1)
    (received,) = unit_needs.waits_for(dependencies, Pass.parse("2F4"), 2)
    assert (str(sent), str(received)) == ("1SEND_F4", "2RECV_F4")
    assert sent.members == received.members == (1, 2)
    assert dependencies.route_of(sent, 1) is dependencies.route_of(received, 2)
    assert unit_needs.consumers(dependencies, sent, 1) == ((2, Pass.parse("2F4")),)
    assert dependencies.route_of(sent, 2) is None


def test_stages_on_one_device_need_no_hop() -> None:
    program = add_communication(random_order(0, Placement.v_shape(2), 2))
    assert set(program.communicators) == {"F:0>1", "B:1>0", "F:1>0", "B:0>1"}
    sent = sorted(str(item) for item in program.rows[1] if isinstance(item, Transfer))
    assert sent == ["1RECV_F0", "1RECV_F1", "1SEND_B0", "1SEND_B1", "2RECV_B0", "2RECV_B1", "2SEND_F0", "2SEND_F1"]
    assert Dependencies(Placement.linear(1), 1).routes == ()


# --- where transfers stand --------------------------------------------------------------------------------------------

PLACED = [
    # order, barriers, costs, program
    (
        "0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1",
        0,
        Costs(F=1, B=2),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1|"
        # 0F1 ends at 2, as 1F0 does: the receive is issued before 1F0.
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ),
    (
        # Issued when its data is ready, not when it has arrived: 0F1 ends at 4 and its data is there at 6;
        # 1F0 runs from 4 to 5. 1B1 ends at 10; 0B0 runs from 9 to 11.
        "0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1",
        0,
        Costs(F=[2, 1], B=2, p2p=2),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1|1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ),
    (
        # T0 runs when dX is ready, and the gradient is on its way to device 0 before it has run.
        "0F0,0B0|1F0,1B0",
        1,
        Costs(F=1, B=2, S=0.4, C=0.1, T=0.4, E=0.1, G=0.1),
        "E0 ROWS0 0F0 0SEND_F0 X0 S0 STATISTICS0 C0 DX0 T0 0RECV_B0 0B0 ROW_GRADIENTS0 G0|"
        "E0 ROWS0 1RECV_F0 1F0 X0 S0 STATISTICS0 C0 DX0 1B0 1SEND_B0 T0 ROW_GRADIENTS0 G0",
    ),
    (
        "0F0,0F0.1,0B0.1,0B0|1F0,1F0.1,1B0.1,1B0",
        0,
        EQUAL_COSTS,
        "0F0 0SEND_F0 0F0.1 0SEND_F0.1 0RECV_B0.1 0RECV_B0 0B0.1 0B0|"
        "1RECV_F0 1RECV_F0.1 1F0 1F0.1 1B0.1 1SEND_B0.1 1B0 1SEND_B0",
    ),
]


@pytest.mark.parametrize(("text", "barriers", "costs", "expected"), PLACED)
def test_small_programs_in_full(text: str, barriers: int, costs: Costs, expected: str) -> None:
    order = Order.from_csv(text.replace("|", "\n"))
    program = add_communication(add_vocabulary(order, barriers) if barriers else order, costs)
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
    program, dependencies = add_communication(order, costs), Dependencies.of(order)
    ends = end_times(order, PassTimes(costs, order.placement).of)
    for device, row in enumerate(program.rows):
        for position, item in enumerate(row):
            if not isinstance(item, Transfer):
                continue
            producers = [
                (there, producer if (there, producer) in ends else Pass.parse(str(producer).replace("B", "I")))
                for there, producer in unit_needs.producers(dependencies, item, device)
            ]
            instant = max(ends[producer] for producer in producers)
            assert all(ends[device, other] <= instant for other in row[:position] if isinstance(other, Pass))
            assert all(ends[device, other] >= instant for other in row[position:] if isinstance(other, Pass))


def test_collectives_are_shared_by_their_members() -> None:
    program = add_communication(add_vocabulary(generate("1f1b", 3, 4), 1))
    found = [[item for item in row if str(item) == "X2"] for row in program.rows]
    assert found[0][0] is found[1][0] is found[2][0]


def test_what_cannot_complete_has_no_program() -> None:
    with pytest.raises(DeadlockError, match="the order cannot complete"):
        add_communication(Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


# --- communicators ----------------------------------------------------------------------------------------------------

HOW_MANY = [
    # devices, schedule, mode, (per-pair, per-kind, one)
    (1, "1f1b", "vocab-2", (0, 0, 0)),
    (2, "1f1b", "first-last", (2, 2, 1)),
    (4, "1f1b", "first-last", (6, 2, 1)),
    (4, "1f1b", "vocab-2", (10, 6, 1)),
    (4, "interleaved", "vocab-1", (12, 6, 1)),  # round the ring
    (4, "zbv", "first-last", (12, 2, 1)),  # there and back, each for F and B
    (8, "zbv", "vocab-2", (32, 6, 1)),
]


@pytest.mark.parametrize(("devices", "schedule", "mode", "counts"), HOW_MANY)
def test_how_many_there_are(devices: int, schedule: str, mode: str, counts: tuple[int, ...]) -> None:
    for sharing, count in zip(SHARING, counts, strict=True):
        _, program = plan_program(schedule, devices, 3, mode, sharing=sharing)
        assert len(program.communicators) == count
        if sharing == "one" and count:
            assert program.communicators == {"ALL": tuple(range(devices))}


def test_transfers_may_share_communicators_where_they_stand(sample: Sample) -> None:
    """Programs that were made for fewer communicators are compared with a second opinion in `test_agreement`."""
    sizes = ((2, 3), (3, 5), (4, 4))
    for name, mode, sharing, (devices, microbatches) in sample(product(SCHEDULES, MODES, SHARING[1:], sizes), 40):
        usual = add_communication(plan_order(name, devices, microbatches, mode))
        shared = usual.shared(sharing)
        assert check_program(shared).ok and shared.shared("per-pair") == usual, (name, mode)


@pytest.mark.parametrize("sharing", SHARING[1:])
def test_dx_stands_a_quarter_interval_before_the_backward_of_the_last_stage(sharing: str) -> None:
    """F = 2 and B = 4, so an interval is 6, and dX stands 1.5 before B where C was done earlier."""
    costs = Costs(F=2, B=4, S=1, C=0, T=0.5, E=0, G=0)
    order = plan_order("1f1b", 4, 8, "vocab-2", costs)
    at = {(event.device, str(event.item)): event for row in time_order(order, costs).events for event in row}
    usual, program = add_communication(order, costs), add_communication(order, costs, sharing)
    for microbatch in range(8):
        ready = max(at[device, f"C{microbatch}"].end for device in range(4))
        due = max(ready, at[3, f"3B{microbatch}"].start - 1.5)
        for device in range(4):
            row = list(map(str, program.rows[device]))
            here = row.index(f"DX{microbatch}")
            assert all(at[device, text].end <= due + 1e-9 for text in row[:here] if (device, text) in at)
            assert all(at[device, text].end >= due - 1e-9 for text in row[here:] if (device, text) in at)
    assert program.rows != usual.shared(sharing).rows


# --- memory of what is received and sent ------------------------------------------------------------------------------


def per_stage(program: Program, device: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each stage that receives: the most forwards in flight, buffers for hidden states that no F has used yet,
    buffers for gradients that no B or I has used yet, and buffers for hidden states that wait or are the input of a
    forward in flight."""
    forward, backward, in_flight = Counter[int | None](), Counter[int | None](), Counter[int | None]()
    most: list[Counter[int | None]] = [Counter() for _ in range(4)]
    for item in program.rows[device]:
        if isinstance(item, Transfer):
            forward[item.stage] += item.kind is TransferKind.RECV_F
            backward[item.stage] += item.kind is TransferKind.RECV_B
        for part in parts_of(item) if isinstance(item, Pass) else ():
            if part.kind is Kind.F:
                forward[part.stage] -= forward[part.stage] > 0  # a local neighbour needs no buffer
                in_flight[part.stage] += 1
            elif part.kind in {Kind.B, Kind.I}:
                backward[part.stage] -= backward[part.stage] > 0
                in_flight[part.stage] -= 1
        for stage in in_flight.keys() | forward.keys():
            for record, now in zip(
                most,
                (in_flight[stage], forward[stage], backward[stage], forward[stage] + in_flight[stage]),
                strict=True,
            ):
                record[stage] = max(record[stage], now)
    for stage in program.placement.stages_of(device):
        yield tuple(record[stage] for record in most)


def test_no_more_buffers_than_in_flight_and_one(sample: Sample) -> None:
    """At equal costs. One or two come early, while the forward before them still runs."""
    modes = ["first-last", "interlaced", "vocab-1", "vocab-2"]
    for name, mode, devices in sample(product(SCHEDULES, modes, (2, 3, 4)), 24):
        for microbatches in (1, devices, 2 * devices + 1):
            _, program = plan_program(name, devices, microbatches, mode)
            for device in range(devices):
                for in_flight, forward, backward, with_inputs in per_stage(program, device):
                    assert forward <= in_flight + 1, (name, mode)
                    assert backward <= in_flight, (name, mode)
                    assert with_inputs <= in_flight + 2, (name, mode)


def test_receives_of_1f1b_are_posted_when_data_is_due_and_not_before(sample: Sample) -> None:
    """At most two wait for the pass that takes them, whatever the number of microbatches."""
    takes = {TransferKind.RECV_F: Kind.F, TransferKind.RECV_B: Kind.B, TransferKind.X: Kind.S}
    for mode, devices, microbatches in sample(product(MODES, (2, 3, 4, 8), (1, 3, 8, 40)), 12):
        _, program = plan_program("1f1b", devices, microbatches, mode)
        for row in program.rows:
            for kind, taker in takes.items():
                held = 0
                for item in row:
                    held += (item.kind is kind) - (item.kind is taker and held > 0)
                    assert held <= 2, (mode, devices, microbatches)


RELEASED = [
    # schedule, devices, microbatches, device: after which pass what has arrived
    ("1f1b", 2, 2, 0, {"0B0": "0SEND_F0", "0B1": "0SEND_F1"}),
    ("1f1b", 2, 3, 1, {"1F2": "1SEND_B0"}),
    ("gpipe", 2, 3, 1, {}),  # device 0 sends nothing any more once it has gradients
    ("gpipe", 2, 3, 0, {"0B0": "0SEND_F0 0SEND_F1 0SEND_F2"}),
]


@pytest.mark.parametrize(("schedule", "devices", "microbatches", "device", "expected"), RELEASED)
def test_what_was_sent_is_given_back_once_it_must_have_arrived(
    schedule: str, devices: int, microbatches: int, device: int, expected: dict[str, str]
) -> None:
    """That it is never too early is compared with a second opinion in `test_agreement`."""
    _, program = plan_program(schedule, devices, microbatches, "first-last")
    row = program.rows[device]
    found = {str(row[place]): " ".join(map(str, sent)) for place, sent in releases(program, device).items()}
    assert found == expected


def test_a_long_step_holds_no_more_than_a_short_one() -> None:
    """1F1B: forwards are known to have arrived by their gradients, gradients by later forwards."""
    most = []
    for microbatches in (8, 40):
        _, program = plan_program("1f1b", 4, microbatches, "first-last")
        held = []
        for device, row in enumerate(program.rows):
            back, open_, peak = releases(program, device), 0, 0
            for position, item in enumerate(row):
                open_ += isinstance(item, Transfer) and item.kind.value.startswith("SEND")
                peak = max(peak, open_)
                open_ -= len(back.get(position, ()))
            held.append((peak, open_))
        most.append(held)
    assert most[0] == most[1]
    assert all(left <= peak <= 4 for peak, left in most[0])
