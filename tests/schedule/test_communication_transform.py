"""Where transfers stand in a program."""

from __future__ import annotations

import pytest
import unit_needs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import completes, end_times, random_costs, random_order, same_transfer

from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    Costs,
    DeadlockError,
    Dependencies,
    Order,
    Pass,
    Placement,
    Program,
    Transfer,
    add_communication,
    add_vocabulary,
    check_program,
    evaluation_program,
    generate,
    interlace,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import PassTimes


def rows(program: Program) -> list[str]:
    return [" ".join(map(str, row)) for row in program.rows]


def test_hops_stand_where_their_data_is_ready() -> None:
    assert rows(add_communication(generate("1f1b", 2, 2), Costs(F=1, B=2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        # 0F1 ends at 2, as 1F0 does: the receive is issued before 1F0.
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_a_transfer_is_issued_when_its_data_is_ready_not_when_it_has_arrived() -> None:
    """0F1 ends at 4 and its data is there at 6; 1F0 runs from 4 to 5. 1B1 ends at 10; 0B0 runs from 9 to 11."""
    order = Order.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    assert rows(add_communication(order, Costs(F=[2, 1], B=2, p2p=2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_one_barrier_on_one_microbatch() -> None:
    order = add_vocabulary(generate("1f1b", 2, 1), 1)
    assert rows(add_communication(order, Costs(F=1, B=2, S=0.4, C=0.1, T=0.4, E=0.1, G=0.1))) == [
        "E0 ROWS0 0F0 0SEND_F0 X0 S0 STATISTICS0 C0 DX0 T0 0RECV_B0 0B0 ROW_GRADIENTS0 G0",
        # T0 runs when dX is ready, and the gradient is on its way to device 0 before it has run.
        "E0 ROWS0 1RECV_F0 1F0 X0 S0 STATISTICS0 C0 DX0 1B0 1SEND_B0 T0 ROW_GRADIENTS0 G0",
    ]


def test_one_device_has_no_transfers() -> None:
    for mode in MODES:
        _, program = plan_program("1f1b", 1, 4, mode)
        assert not any(isinstance(item, Transfer) for item in program.rows[0])
        assert program.communicators == {}


def test_stages_on_one_device_have_no_hop() -> None:
    program = add_communication(random_order(0, Placement.v_shape(2), 2))
    assert set(program.communicators) == {"F:0>1", "B:1>0", "F:1>0", "B:0>1"}
    sent = sorted(str(item) for item in program.rows[1] if isinstance(item, Transfer))
    assert sent == ["1RECV_F0", "1RECV_F1", "1SEND_B0", "1SEND_B1", "2RECV_B0", "2RECV_B1", "2SEND_F0", "2SEND_F1"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_size_is_sound_in_training_and_evaluation(name: str, mode: str) -> None:
    sizes = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 4, 7)] + [(8, 5), (8, 24), (13, 3)]
    for devices, microbatches in sizes:
        order, program = plan_program(name, devices, microbatches, mode)
        assert check_program(program).ok
        assert program.order == order
        evaluation = evaluation_program(order)
        assert check_program(evaluation).ok
        assert evaluation.forward_only


CASES = {
    "placement": st.sampled_from(
        [Placement.linear(2), Placement.linear(4), Placement.looped(2, 2), Placement.looped(3, 2), Placement.v_shape(3)]
    ),
    "microbatches": st.integers(1, 5),
    "seed": st.integers(0, 10**6),
    "barriers": st.sampled_from([0, 1, 2]),
    "synchronous": st.booleans(),
    "split": st.booleans(),
}


def build(
    *, placement: Placement, microbatches: int, seed: int, barriers: int, synchronous: bool, split: bool
) -> tuple[Order, Costs]:
    order, costs = random_order(seed, placement, microbatches, split=split), random_costs(seed, placement)
    if barriers:
        order = interlace(order, costs) if synchronous else add_vocabulary(order, barriers, costs)
    return order, costs


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_a_program_completes_however_its_transfers_are_queued(**case: object) -> None:
    """Even if every device waited for each transfer before going on."""
    program = add_communication(*build(**case))
    assert completes(program, lambda transfer: transfer.communicator)
    assert completes(program, lambda transfer: "")
    assert completes(program, lambda transfer: "", blocking=True)


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_a_transfer_stands_at_one_instant_on_all_its_members(**case: object) -> None:
    """After every pass that is predicted to end before its last producer does, before every one that ends later."""
    order, costs = build(**case)
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


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_members_of_a_communicator_issue_its_transfers_in_one_order(**case: object) -> None:
    program = add_communication(*build(**case))
    for name, members in program.communicators.items():
        assert len(members) == len(set(members)) > 1
        issued = {
            tuple(
                same_transfer(item, program.placement)
                for item in program.rows[device]
                if isinstance(item, Transfer) and item.communicator == name
            )
            for device in members
        }
        assert len(issued) == 1


def test_transfers_of_a_program_are_those_that_passes_wait_for_and_feed() -> None:
    order = add_vocabulary(generate("1f1b", 4, 6), 1)
    program, dependencies = add_communication(order), Dependencies.of(order)
    for device in range(4):
        wanted = {
            transfer
            for item in order.passes(device)
            for transfer in (
                *unit_needs.waits_for(dependencies, item, device),
                *unit_needs.feeds(dependencies, item, device),
            )
        }
        assert {item for item in program.rows[device] if isinstance(item, Transfer)} >= wanted


def test_what_cannot_complete_has_no_program() -> None:
    with pytest.raises(DeadlockError, match="the order cannot complete"):
        add_communication(Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


def test_latency_moves_passes_not_the_rule() -> None:
    order = generate("1f1b", 3, 4)
    costs = Costs(F=1, B=2, p2p=0.3)
    assert time_order(order, costs).span > time_order(order, EQUAL_COSTS).span
    assert check_program(add_communication(order, costs)).ok
