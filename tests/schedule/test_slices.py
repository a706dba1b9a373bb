"""Orders of sequence slices: the transform, the rule within a sequence, and what reads it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from schedule_oracle import order_is_sound

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Kind,
    Order,
    Placement,
    Program,
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
from evenpipe.schedule.costs import HOST_COSTS
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
        for barriers in (1, 2):
            found = zip(sequences(add_vocabulary(base, barriers)), sequences(base), strict=True)
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
        assert [fault.what for fault in report.faults][:1] == ([what] if what else [])
    order = Order.from_csv("0F0,0F0.1,0F0.2,0B0.1,0B0", slices=2)
    assert "0F0.2 names a slice that does not exist; slices are 0 to 1" in str(check_order(order).faults[0])
    transfer = Program.from_csv("0F0,0SEND_F0.1,0B0\n1RECV_F0.1,1F0,1B0", slices=1)
    assert any("0SEND_F0.1 is for a slice of a sequence" in fault.what for fault in check_program(transfer).faults)


def test_sizes_are_read_from_the_rows() -> None:
    order = Order.from_csv("0F0,0F0.1,0B0.1,0B0")
    assert (order.microbatches, order.slices, order.units) == (1, 2, 2)
    assert repr(order) == "<Order: 1 device, 1 stage, 1 microbatch of 2 slices, 4 passes>"


REFUSED = [
    (lambda: Order.from_csv("0F0.9,0B0"), "slice 9 appears, but 2 passes leave no room"),
    (lambda: Order.from_csv("0F2,0F2.1,0B2.1,0B2"), "microbatch 2 appears, but 4 passes leave no room"),
    (lambda: Order(Placement.linear(1), 1, ((),), slices=0), "slices must be at least 1, not 0"),
    (lambda: plan_order("dualpipe-v", 2, 4, "first-last", slices=2), "forwards and backwards must be passes of their"),
    (lambda: add_slices(generate("1f1b", 2, 3), 2), "slices is 2, expected a number that divides the 3 units"),
    (lambda: add_slices(cut("1f1b", 2, 2, 2), 2), "sequences of 2 slices already"),
    (lambda: add_slices(recompute.add_recompute(generate("1f1b", 2, 2), [0]), 2), "expected F, B, I and W only"),
    (lambda: add_slices(Order.from_csv("0F1,0F0,0B1,0B0"), 2), "stage 0 does not run its F in the order of"),
    (lambda: plan_order(cut("1f1b", 2, 2, 2), 2, 2, "first-last", slices=4), "sequences of 2 slices, not 4"),
    (lambda: plan_order(generate("1f1b", 2, 4), 2, 4, "first-last", slices=2), "sequences of 1 slice, not 2"),
    (lambda: plan_order("1f1b", 2, 4, "first-last", slices=0), "slices must be a whole number of at least 1, not 0"),
    (lambda: plan_order("1f1b", 2, 4, "first-last", slices=True), "slices must be a whole number"),
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
