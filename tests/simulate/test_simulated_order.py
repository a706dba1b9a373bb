"""What holds for every simulation.

| costs                                   | then                                                                    |
|-----------------------------------------|-------------------------------------------------------------------------|
| times alone, nothing is copied          | passes run exactly when the event model of `timing` says                |
| any                                     | busy = sum of durations; busy + waiting = makespan; same result again   |
| any                                     | the critical path has no gap and is as long as the step                 |
| any                                     | span and makespan are not shorter than their lower bounds               |
| any that know bytes                     | the memory curve starts above 0, ends at 0, and its top is `peak_bytes` |
| longer times, no slow-down, no sharing  | the step is not shorter                                                 |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from simulated_cases import CASES, order_of_case, random_costs

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Order,
    Program,
    Timeline,
    add_communication,
    generate,
    time_order,
    without_offload,
)
from evenpipe.schedule.costs import PassTimes
from evenpipe.simulate import simulate

Sample = Callable[..., list[Any]]
LINKS = {
    "p2p": {"latency": 0.3, "bandwidth": 10.0, "bytes": 5.0},
    "broadcast": {"latency": 0.7},
    "reduce": {"latency": 0.1, "bandwidth": 4.0, "bytes": 3.0},
}
HOP = {"F:0>1": {"bandwidth": 2.0}}


def fitting(order: Order, more: dict[str, object]) -> dict[str, object]:
    """`more` costs, with a slow hop where there is one."""
    return {"links": {**LINKS, **HOP}} if "links" in more and order.devices > 1 else more


def passes(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(event.item), event.start, event.end) for event in row] for row in timeline.events]


def test_with_times_alone_passes_run_as_in_the_event_model(sample: Sample) -> None:
    for case in sample(CASES, 40):
        if (planned := order_of_case(*case)) is None:
            continue
        order = without_offload(planned)
        for costs in (EQUAL_COSTS, random_costs(order.placement, seed=order.microbatches)):
            simulated, timeline = simulate(order, costs).timeline, time_order(order, costs)
            assert passes(simulated) == passes(timeline), case
            assert simulated.peak_in_flight == timeline.peak_in_flight, case
            assert simulated.peak_bytes == timeline.peak_bytes, case


WHATEVER: list[dict[str, object]] = [
    *({}, {"links": LINKS}, {"overlap_slowdown": 1.5}),
    *({"contention": 1.3}, {"contention": 1.5, "overlap_slowdown": 1.5}),
]


def test_what_holds_whatever_the_costs(sample: Sample) -> None:
    for case, more in sample(product(CASES[::3], WHATEVER), 40):
        if (order := order_of_case(*case)) is not None:
            check_simulation(order, random_costs(order.placement, seed=7, **fitting(order, more)))


def check_simulation(order: Order, costs: Costs) -> None:
    simulation = simulate(order, costs)
    timeline, times = simulation.timeline, PassTimes(costs, order.placement)
    most = costs.contention * costs.overlap_slowdown
    for device, row in enumerate(timeline.events):
        assert all(event.end - event.start <= most * times.of(event.item, device) + 1e-9 for event in row)
        worked = sum(times.of(event.item, device) for event in row)
        assert timeline.busy[device] == pytest.approx(worked + simulation.slowed[device])
        assert timeline.busy[device] + sum(simulation.waiting[device].values()) == pytest.approx(simulation.makespan)
    steps = simulation.critical_path.steps
    assert steps[0].start == 0
    assert all(before.end == after.start for before, after in pairwise(steps))
    assert steps[-1].end == simulation.makespan
    for shares in (simulation.critical_path.by_kind, simulation.critical_path.by_resource):
        assert sum(shares.values()) == pytest.approx(simulation.makespan)
    assert timeline.memory is not None
    for curve, peak in zip(timeline.memory, timeline.peak_bytes, strict=True):
        assert curve[-1][1] == 0
        assert max(held for _, held in curve) == peak > 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})
    for of in ("span", "makespan"):
        assert simulation.bounds[of].value <= getattr(simulation, of) * (1 + 1e-9), of
    assert simulate(order, costs).to_dict() == simulation.to_dict()


def test_longer_times_do_not_shorten_the_step(sample: Sample) -> None:
    for case, more in sample(product(CASES[1::4], WHATEVER[:2]), 10):
        if (order := order_of_case(*case)) is None:
            continue
        costs = random_costs(order.placement, seed=5, **fitting(order, more))
        program = add_communication(order, costs)
        before = simulate(program, costs).makespan
        chance = random.Random(str(case))
        for kind in "FIWST":
            longer = tuple(time + chance.choice([0, 0, 1]) for time in getattr(costs, kind))
            assert simulate(program, replace(costs, **{kind: longer})).makespan >= before, (case, kind)


def test_a_program_keeps_its_places_when_the_costs_are_others() -> None:
    # Planned for equal stages and hops without time, 1RECV_F2 stands behind 1B1. With a slow stage 1, its data is ready
    # at 13, but 1B1 runs from 14 to 15: only then the device comes to the transfer.
    order = generate("1f1b", 2, 3)
    program = add_communication(order, Costs(F=1, B=1))
    costs = Costs(F=[1, 5], B=1, p2p=2)
    simulation = simulate(program, costs)
    hops = {str(event.item): (event.start, event.end) for event in simulation.timeline.concurrent[1]}
    assert (hops["1RECV_F1"], hops["1RECV_F2"]) == ((2, 4), (15, 17))
    assert simulation.makespan == time_order(order, costs).makespan + 2
    assert simulate(order, costs).makespan == time_order(order, costs).makespan  # planned with these costs


def test_a_program_that_cannot_complete_is_refused_with_its_faults() -> None:
    crossed = Program.from_csv("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    foreign = Program.from_csv("0F0,0SEND_F0,0RECV_B0,0B0,X0\n1RECV_F0,1F0,1B0,1SEND_B0")
    missing = Program.from_csv("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    assert simulate(crossed, Costs(F=1, B=1)).makespan == 4  # one communicator per direction: the hops pass each other
    for wrong, message in (
        (foreign, "no pass needs X0"),
        (missing, "0RECV_B0 is missing"),
        (Order.from_csv("0B0,0F0"), "deadlock: device 0"),
    ):
        with pytest.raises(InputError, match=message):
            simulate(wrong, Costs(F=1, B=1))


def test_what_the_report_has() -> None:
    report = simulate(generate("1f1b", 2, 3), Costs(F=1, B=2, bytes=10)).to_dict()
    assert [report[key] for key in ("span", "makespan", "skew", "bubble", "bubble_rate")] == [12, 12, 0, 3, 0.25]
    assert [report[key] for key in ("busy", "peak_in_flight", "peak_bytes")] == [[9, 9], [2, 1], [20, 10]]
    assert report["busy_by_kind"] == [{"F": 3, "B": 6}, {"F": 3, "B": 6}]
    assert report["waiting"] == [{"RECV_B": 3}, {"RECV_F": 1, "end": 2}]
    assert report["critical_path"]["by_device"] == [3, 9]
    assert report["bounds"]["span"]["value"] == 12
    assert simulate(generate("1f1b", 2, 3), Costs(F=1, B=2)).to_dict()["peak_bytes"] is None
