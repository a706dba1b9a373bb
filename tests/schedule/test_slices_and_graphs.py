"""Orders of sequence slices, and stages that form a graph: a diamond, and two branches of different length."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import walked
from schedule_oracle import DIAMOND, GRAPHS, UNEVEN, end_times, order_is_sound, random_costs, random_order
from traced_steps import measured

from evenpipe.draw import trace
from evenpipe.errors import InputError
from evenpipe.interop import to_torch
from evenpipe.memory.walk import walk
from evenpipe.runtime.row import validate_program
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Costs,
    Kind,
    Order,
    Placement,
    Program,
    Transfer,
    TransferKind,
    add_communication,
    add_recompute,
    add_slices,
    add_vocabulary,
    check_order,
    check_program,
    evaluation_program,
    generate,
    plan_order,
    plan_program,
    time_order,
)
from evenpipe.schedule.costs import HOST_COSTS, PassTimes
from evenpipe.schedule.passes import parse_item
from evenpipe.schedule.trace_file import read_trace, trace_from_dict, trace_to_dict, write_trace
from evenpipe.schedule.transforms import recompute
from evenpipe.simulate import simulate

# p 8, m 8, by slices 1, 2, 4, 8: bubble in percent of the step, and the most sequences in flight.
PUBLISHED = {
    "1f1b": ((46.7, 8.0), (30.4, 4.5), (17.9, 2.75), (9.9, 1.88)),
    "interleaved": ((30.4, 8.0), (17.9, 6.25), (9.9, 3.38), (5.2, 1.94)),
    "zb-h1": ((22.6, 8.0), (12.7, 4.5), (7.7, 2.75), (4.5, 1.88)),
    "zbv": ((22.6, 8.0), (9.4, 4.5), (7.7, 2.75), (4.5, 1.88)),
    "v-half": ((28.4, 5.0), (18.6, 3.0), (12.3, 2.0), (9.2, 1.5)),
    "gis": ((22.6, 8.0), (12.7, 4.5), (6.8, 2.5), (3.5, 1.5)),
}
WITHOUT_JOINT_PASSES: dict[str, dict[str, Any]] = {"dualpipe-v": {"overlap": False}}
"""Options of schedules that cannot be cut otherwise."""


def cut(name: str, devices: int, microbatches: int, slices: int) -> Order:
    return add_slices(generate(name, devices, microbatches * slices), slices)


def sequences(order: Order) -> list[Fraction]:
    """The most sequences in flight, per device."""
    stages = [len(order.placement.stages_of(device)) for device in range(order.devices)]
    peaks = time_order(order, EQUAL_COSTS).peak_in_flight
    return [Fraction(peak, held * order.slices) for peak, held in zip(peaks, stages, strict=True)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_bubbles_and_sequences_in_flight(name: str) -> None:
    found = []
    for slices in (1, 2, 4, 8):
        order = cut(name, 8, 8, slices)
        timeline = time_order(order, EQUAL_COSTS)
        bubble = 100 * (1 - max(timeline.busy) / timeline.makespan)
        found.append((float(f"{bubble:.1f}"), float(f"{float(max(sequences(order))):.3g}")))
    assert tuple(found) == tuple((bubble, float(f"{held:.3g}")) for bubble, held in PUBLISHED[name])


def test_1f1b_meets_its_closed_forms() -> None:
    """Every device runs as many forwards ahead of its backwards as Seq1F1B: p - 1 - r + n - 1, as far as there are."""
    for p, m, n in product((1, 2, 3, 5, 8), (1, 3, 8), (1, 2, 3, 4)):
        order = cut("1f1b", p, m, n)
        timeline = time_order(order, EQUAL_COSTS)
        busy = int(max(timeline.busy))
        assert Fraction(int(timeline.makespan) - busy, busy) == Fraction(p - 1, n * m)
        assert sequences(order) == [min(Fraction(m), 1 + Fraction(p - 1 - r, n)) for r in range(p)]
        ahead = [[item.kind for item in row].index(Kind.B) for row in order.rows]
        assert ahead == [min(m * n, p - 1 - device + n) for device in range(p)]


def test_small_orders_in_full() -> None:
    assert cut("1f1b", 2, 2, 2).to_csv() == (
        "0F0,0F0.1,0F1,0B0.1,0F1.1,0B0,0B1.1,0B1\n1F0,1F0.1,1B0.1,1F1,1B0,1F1.1,1B1.1,1B1\n"
    )
    assert cut("gpipe", 3, 2, 2).to_csv().startswith("0F0,0F0.1,0F1,0F1.1,0B0.1,0B0,0B1.1,0B1\n")


def test_every_family_and_mode(sample: Callable[..., list[Any]]) -> None:
    sizes, modes = ((1, 2, 2), (2, 3, 4), (4, 6, 3), (5, 2, 2)), ["first-last", "interlaced", "vocab-1", "vocab-2"]
    for name, mode, (p, m, n) in sample(product(SCHEDULES, modes, sizes), 24):
        costs = HOST_COSTS if name.startswith("po-") else EQUAL_COSTS
        order, program = plan_program(name, p, m, mode, slices=n, **WITHOUT_JOINT_PASSES.get(name, {}))
        assert (order.microbatches, order.slices, program.slices) == (m, n, n)
        assert order_is_sound(order) and order_is_sound(evaluation_program(order).order)
        assert Order.from_csv(order.to_csv(), placement=order.placement) == order
        again = Program.from_csv(program.to_csv(), placement=program.placement)
        assert (again.rows, again.slices) == (program.rows, n)
        if p < 5:
            simulation = simulate(program, costs)
            assert simulation.bounds["makespan"].value <= simulation.makespan * (1 + 1e-9)


def test_vocabulary_passes_cost_as_much_memory_as_barriers() -> None:
    for name in ("1f1b", "zb-h1", "zbv", "v-half"):
        base = cut(name, 4, 6, 4)
        for barriers, mode in enumerate(("vocab-2", "vocab-1"), 1):
            found = zip(sequences(add_vocabulary(base, mode)), sequences(base), strict=True)
            assert all(lowered <= without + Fraction(barriers, 4) for lowered, without in found), (name, barriers)


FAULTS = [
    ("0F0.1,0F0,0B0.1,0B0", "0F0.1 comes before 0F0 at position 1, which it needs"),
    ("0F0,0F0.1,0B0,0B0.1", "0B0 comes before 0B0.1 at position 3, which it needs"),
    ("0F0,0F0.1,0I0,0B0.1,0W0", "0I0 comes before 0B0.1 at position 3, which it needs"),
    ("0F0,0F0.1,0B0.1", "0B0 is missing, so its activations are never released"),
    ("0F0,0F0.1,0F0.1,0B0.1,0B0", "0F0.1 is already at position 1"),
    ("0F0,(0F0.1;0B0.1)OVERLAP_F_B,0B0", ""),
    ("0F0,(0B0;0F0.1)OVERLAP_F_B,0B0.1", "0B0 comes before 0B0.1 at position 2, which it needs"),
]


def test_faults() -> None:
    for row, what in FAULTS:
        report = check_order(Order.from_csv(row))
        assert [fault.message for fault in report.faults][:1] == ([what] if what else [])
    order = Order.from_csv("0F0,0F0.1,0F0.2,0B0.1,0B0", slices=2)
    assert "0F0.2 names a slice that does not exist; slices are 0 to 1" in str(check_order(order).faults[0])
    transfer = Program.from_csv("0F0,0SEND_F0.1,0B0\n1RECV_F0.1,1F0,1B0", slices=1)
    assert any("0SEND_F0.1 is for a slice of a sequence" in fault.message for fault in check_program(transfer).faults)


def test_sizes_are_read_from_the_rows() -> None:
    order = Order.from_csv("0F0,0F0.1,0B0.1,0B0")
    assert (order.microbatches, order.slices, order.units) == (1, 2, 2)
    assert repr(order) == "<Order: 1 device, 1 stage, 1 microbatch of 2 slices, 4 passes>"


REFUSED = [
    (lambda: Order.from_csv("0F0.9,0B0"), "slice 9 appears, but 2 passes leave no room"),
    (lambda: Order.from_csv("0F2,0F2.1,0B2.1,0B2"), "microbatch 2 appears, but 4 passes leave no room"),
    (lambda: Order(Placement.linear(1), 1, ((),), slices=0), "slices is 0; it must be at least 1"),
    (lambda: plan_order("dualpipe-v", 2, 4, "first-last", slices=2), "forwards and backwards must be passes of their"),
    (lambda: add_slices(generate("1f1b", 2, 3), 2), "slices is 2; it must be a number that divides the 3 units"),
    (lambda: add_slices(cut("1f1b", 2, 2, 2), 2), "sequences of 2 slices already"),
    (lambda: add_slices(recompute.add_recompute(generate("1f1b", 2, 2), [0]), 2), "expected F, B, I and W only"),
    (lambda: add_slices(Order.from_csv("0F1,0F0,0B1,0B0"), 2), "stage 0 does not run its F in the order of"),
    (lambda: plan_order(cut("1f1b", 2, 2, 2), 2, 2, "first-last", slices=4), "sequences of 2 slices, not 4"),
    (lambda: plan_order(generate("1f1b", 2, 4), 2, 4, "first-last", slices=2), "sequences of 1 slice, not 2"),
    (lambda: plan_order("1f1b", 2, 4, "first-last", slices=0), "slices is 0; it must be a whole number of at least 1"),
    (lambda: plan_order("1f1b", 2, 4, "first-last", slices=True), "slices is true; it must be a whole number"),
]


def test_refused() -> None:
    for make, message in REFUSED:
        with pytest.raises(InputError, match=message):
            make()


def test_orders_with_slices_are_planned_as_they_are_and_copies_placed_anew() -> None:
    order = cut("zb-h1", 3, 4, 2)
    assert plan_order(order, 3, 4, "first-last") == order
    assert plan_order(order, 3, 4, "first-last", slices=2) == order
    assert plan_order(lambda p, units: generate("zb-h1", p, units), 3, 4, "first-last", slices=2) == order
    order = plan_order("po-f", 4, 4, "first-last", HOST_COSTS, slices=2)
    assert any(item.kind is Kind.O and item.slice for row in order.rows for item in row) and check_order(order).ok


# --- stages that form a graph -----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
@pytest.mark.parametrize("number", range(len(GRAPHS)))
@pytest.mark.sampled(3)
def test_the_walker_assumes_no_chain(number: int, mode: str) -> None:
    """A stage takes what all stages before it return, and its gradient is the sum of those from all behind it.

    Pipelines refuse graphs; this leaves the refusal out.
    """
    for seed in range(3):
        base = random_order(seed, GRAPHS[number], 3, split=seed == 1)
        _, program = plan_program(add_recompute(base) if seed == 2 else base, base.devices, 3, mode)
        with pytest.raises(InputError, match="the runtime trains a chain only"):
            walked.walk(program, seed)
        with mock.patch(f"{validate_program.__module__}.validate_program"):
            walked.walk(program, seed)


@pytest.mark.parametrize("mode", ["first-last", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("number", range(len(GRAPHS)))
@pytest.mark.sampled(6)
def test_any_order_on_a_graph(number: int, mode: str) -> None:
    """Written, timed, simulated, held in memory; that they are sound is found in `test_agreement`."""
    for seed, slices in ((1, 1), (2, 2), (3, 1)):
        base = random_order(seed, GRAPHS[number], 3, split=seed == 3, slices=slices)
        order, program = plan_program(base, base.devices, 3, mode, random_costs(seed, base.placement))
        assert Program.from_csv(program.to_csv(), placement=program.placement) == program
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
