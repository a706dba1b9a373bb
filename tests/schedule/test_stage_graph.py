"""Stages that form a graph: a diamond, and two branches of different length."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from schedule_oracle import DIAMOND, GRAPHS, UNEVEN, completes, end_times, order_is_sound, random_costs, random_order
from traced_steps import measured

from evenpipe.draw import trace
from evenpipe.errors import InputError
from evenpipe.interop import to_torch
from evenpipe.memory.walk import walk
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Order,
    Placement,
    Program,
    Transfer,
    TransferKind,
    add_communication,
    check_program,
    evaluation_program,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.passes import parse_item
from evenpipe.schedule.trace_file import read_trace, trace_from_dict, trace_to_dict, write_trace
from evenpipe.simulate import simulate

# One microbatch after the other on a diamond: stages 1 and 2 run side by side.
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n3F0,3B0,3F1,3B1\n"


def diamond() -> Order:
    return Order.from_csv(CSV, edges=DIAMOND)


def test_an_order_is_written_as_rows_and_edges() -> None:
    order = diamond()
    assert order.placement == Placement(4, (0, 1, 2, 3), DIAMOND)
    assert Order.from_csv(order.to_csv(), edges=reversed(DIAMOND)) == order
    assert not order.placement.is_chain
    assert Placement(4, (0, 1, 2, 3), ((0, 1), (1, 2), (2, 3))) == Placement.linear(4)
    assert Placement.linear(4).is_chain
    assert (order.placement.predecessors(3), order.placement.successors(0)) == ((1, 2), (1, 2))


def test_hops_name_their_other_end_where_there_are_several() -> None:
    program = add_communication(diamond())
    rows = [[str(item) for item in row if isinstance(item, Transfer)] for row in program.rows]
    assert set(rows[0]) == {
        *("0SEND_F0>1", "0SEND_F0>2", "0SEND_F1>1", "0SEND_F1>2"),
        *("0RECV_B0<1", "0RECV_B0<2", "0RECV_B1<1", "0RECV_B1<2"),
    }
    one_neighbour = product(("RECV_F", "SEND_F", "RECV_B", "SEND_B"), (0, 1))  # on each side: as torch writes them
    assert set(rows[1]) == {f"1{kind}{i}" for kind, i in one_neighbour}
    assert {"3RECV_F0<1", "3RECV_F0<2", "3SEND_B0>1", "3SEND_B0>2"} <= set(rows[3])
    assert Program.from_csv(program.to_csv(), edges=DIAMOND) == program
    for text in ("0SEND_F0.1>2", "3RECV_F0<1", "3SEND_B12>1", "0RECV_B0<2"):
        assert str(parse_item(text)) == text
    assert parse_item("0SEND_F0.1>2") == Transfer(TransferKind.SEND_F, 0, 0, 1, peer=2)


def test_wrong_words_and_edges() -> None:
    for text in ("0SEND_F0<2", "3RECV_F0>1", "X0>1", "0F0>1", "0SEND_F>1", "0SEND_F0>", "0SEND_F0>01"):
        with pytest.raises(InputError, match="is not a pass or transfer"):
            parse_item(text)
    for edges, message in (
        (((0, 1), (0, 2), (1, 3)), "no edge leaves stage 2; only stage 3 ends the graph"),
        (((0, 1), (1, 3), (2, 3)), "no edge leads to stage 2; only stage 0 begins the graph"),
        (((0, 1), (1, 0)), "edge 1>0 must lead to a higher stage; stages are 0 to 3"),
        (((0, 1), (1, 2), (2, 4)), "edge 2>4 must lead to a higher stage"),
        (((0, 1), (0, 1), (1, 2), (2, 3)), "edge 0>1 is given twice"),
    ):
        with pytest.raises(InputError, match=message):
            Placement(4, (0, 1, 2, 3), edges)
    values = trace_to_dict(measured(add_communication(diamond()), Costs(F=1, B=2)))
    for wrong in ([[0]], [0], [[0, "1"]], {}):
        with pytest.raises(InputError, match="edges"):
            trace_from_dict({**values, "edges": wrong})
    with pytest.raises(InputError, match="torch's runtime knows chains of stages only"):
        to_torch(diamond())


def test_branches_run_side_by_side() -> None:
    """F of 0, then of 1 and 2 at once, then of 3; and back: four stages take the time of three."""
    one = Order.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0,3B0", edges=DIAMOND)
    chain = Order.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0,3B0")
    assert time_order(one, EQUAL_COSTS).makespan == 9
    assert time_order(chain, EQUAL_COSTS).makespan == 12
    # With branches of different length the longer one decides.
    uneven = Order.from_csv("".join(f"{stage}F0,{stage}B0\n" for stage in range(5)), edges=UNEVEN)
    assert time_order(uneven, EQUAL_COSTS).makespan == 12
    long_one = Costs(F=(1, 1, 1, 5, 1), B=2, p2p=0.25)
    assert time_order(uneven, long_one).makespan == (1 + 5 + 1) + 2 * 0.25 + 4 * 2 + 3 * 0.25


def test_a_backward_needs_the_gradients_of_every_branch() -> None:
    without = add_communication(diamond()).to_csv().replace(",2SEND_B1", "")
    faults = check_program(Program.from_csv(without, edges=DIAMOND)).faults
    assert "2SEND_B1 is missing" in [fault.what for fault in faults]
    late = CSV.replace("2F0,2B0,2F1,2B1", "2F0,2F1,2B1,2B0")
    with pytest.raises(InputError, match=r"0B0, awaiting 2B0 of device 2"):
        time_order(Order.from_csv(late.replace("0F1,0B0", "0B0,0F1"), edges=DIAMOND), EQUAL_COSTS)


@pytest.mark.parametrize("mode", ["first-last", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("number", range(len(GRAPHS)))
@pytest.mark.sampled(6)
def test_any_order_on_a_graph(number: int, mode: str) -> None:
    """Planned, checked, timed, simulated, held in memory: all as second opinions say."""
    for seed, slices in ((1, 1), (2, 2), (3, 1)):
        base = random_order(seed, GRAPHS[number], 3, split=seed == 3, slices=slices)
        order, program = plan_program(base, base.devices, 3, mode, random_costs(seed, base.placement))
        assert order_is_sound(order)
        assert completes(program, lambda transfer: "", blocking=True)
        assert Program.from_csv(program.to_csv(), placement=program.placement) == program
        evaluation = evaluation_program(order)
        assert completes(evaluation, lambda transfer: transfer.communicator)
        if mode == "first-last":
            end = max(end_times(order, PassTimes(EQUAL_COSTS, order.placement).of).values())
            assert time_order(order, EQUAL_COSTS).makespan == pytest.approx(end)
            assert simulate(program, EQUAL_COSTS).makespan == pytest.approx(end)
        for device in range(program.devices):
            walk(program, device, gradients_exist=False, buffers_exist=False)  # asserts that nothing is left


def test_arrows_follow_the_edges() -> None:
    events = json.loads(trace(time_order(diamond(), EQUAL_COSTS)))["traceEvents"]
    begins, ends = ({event["id"]: event["pid"] for event in events if event["ph"] == phase} for phase in "sf")
    there = [(1, 2), (1, 3), (2, 4), (3, 4)]
    back = [(target, source) for source, target in there]
    assert sorted((begins[number], ends[number]) for number in begins) == sorted(2 * [*there, *back])


@pytest.mark.parametrize("slices", [1, 2])
def test_traces_keep_edges_and_slices(slices: int, tmp_path: Path) -> None:
    costs = Costs(F=1, B=2, p2p=0.25)
    program = add_communication(random_order(5, GRAPHS[1], 2, slices=slices), costs)
    write_trace(measured(program, costs), tmp_path / "step.json")
    again = read_trace(tmp_path / "step.json")
    assert again.program == program
    assert again.timeline().makespan == pytest.approx(simulate(program, costs).makespan)
