"""Slack: a pass that ends later by its slack keeps the length of the step, and by more than that lengthens it."""

from __future__ import annotations

import random

import pytest
from simulated_cases import random_costs
from text_tables import order_of

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Program, add_communication, plan_order
from evenpipe.simulate import simulate
from evenpipe.simulate.loop import Loop
from evenpipe.simulate.slack import slacks
from evenpipe.simulate.work import COPIES, Work

MODES = ("first-last", "vocab-1", "vocab-2", "interlaced")


def run(program: Program, costs: Costs, later: dict[int, float]) -> tuple[Work, Loop, float]:
    """Simulate a program in which some passes and transfers take longer; the end of its step."""
    work = Work(program, costs)
    for number, time in later.items():
        work.takes[number] += time
    loop = Loop(work, costs.overlap_slowdown, costs.engine, costs.contention)
    assert loop.run()
    counted = (n for row in work.rows for n in row if not work.numbered.is_transfer(n))
    return work, loop, max(loop.end[n] for n in counted if work.overlapped.get(n) not in COPIES)


def assert_exact(program: Program, costs: Costs, numbers: random.Random, most: int = 25) -> None:
    work, loop, step = run(program, costs, {})
    result = slacks(work, loop, costs.engine)
    assert set(result) == {n for row in work.rows for n in row}
    for n in numbers.sample(sorted(result), min(most, len(result))):
        slack, first = result[n]
        assert slack >= -1e-9 * step
        assert run(program, costs, {n: slack})[2] == pytest.approx(step, rel=1e-9), n
        for more in (0.01, 1.0):
            assert run(program, costs, {n: slack + more})[2] == pytest.approx(step + more, rel=1e-9), n
        if first is not None:  # what it names is late by then, and the reason for the longer step
            _, later, _ = run(program, costs, {n: slack + 0.01})
            assert later.start[first] == pytest.approx(loop.start[first] + result[first][0] + 0.01, rel=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-min", "dualpipe-v", "po-h"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(12)
def test_a_delay_by_the_slack_is_free_and_by_more_is_not(name: str, mode: str) -> None:
    """At random times per stage and device, with transfers that take time and copies that take none."""
    numbers = random.Random(f"{name} {mode}")
    shape = numbers.choice([(2, 4), (2, 5), (3, 6)])
    try:
        order = plan_order(name, *shape, mode)
    except InputError:
        order = plan_order(name, 2, 6, mode)
    costs = random_costs(order.placement, numbers.randint(0, 999))
    assert_exact(add_communication(order, costs), costs, numbers)


ONES = {"F": 1, "B": 1}
REPLICAS = {"links": {"replicas": {"bandwidth": 1.0}}, "sharding": {"UNSHARD": (3.0, 5.0), "REDUCE_GRAD": 6.0}}
BY_HAND: dict[str, tuple[str, dict[str, object], str]] = {
    # rows, costs; of some events the slack, and the pass that waits first ("-": the end of the step)
    "a weight gradient has time": (
        "0F0 0I0 0W0|1F0 1I0 1W0",
        {"F": 1, "I": 1, "W": 1},
        "0F0 0 1F0, 1RECV_F0 0 1F0, 1I0 0 0I0, 0I0 0 0W0, 1W0 1 -, 0W0 0 -",
    ),
    # Hops from 1 to 4 and from 4 to 7: the first one must end for the second one, too.
    "a hop queues for its link": (
        "0F0 0F1 0B0 0B1|1F0 1B0 1F1 1B1",
        {**ONES, "links": {"p2p": {"latency": 3}}},
        "0F0 0 1F0, 1RECV_F0 0 1F0, 0F1 2 1F1, 1F1 0 1B1, 0B0 2 0B1, 0B1 0 -",
    ),
    # Copies from 1 to 3, 3 to 5, and back from 5 to 7.
    "a copy queues for its stream": (
        "0F0 0O0 0F1 0O1 0D0 0L0 0B0 0D1 0L1 0B1",
        {**ONES, "O": 2, "L": 2},
        "0F0 0 0B0, 0O0 0 0B0, 0F1 1 0B0, 0D0 2 0B0, 0L0 0 0B0, 0B0 0 0D1",
    ),
    # Both gather from 0 to 8, and sum from 14 to 26: that is the end of the step.
    "collectives over replicas queue": (
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD",
        {"F": 2, "B": 4, **REPLICAS},
        "0UNSHARD 0 1F0, 0F0 3 1F0, 1B0 0 -, 0B0 2 -, 0REDUCE_GRAD 0 -, 0RESHARD 8 -",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_slack_by_hand(name: str) -> None:
    rows, costs, expected = BY_HAND[name]
    schedule = Program.from_csv(rows.replace(" ", ",")) if "UNSHARD" in rows else order_of(rows)
    simulation = simulate(schedule, Costs(**costs))  # type: ignore[arg-type]
    timeline = simulation.timeline_with_slack
    result = {}
    for row in (*timeline.events, *timeline.concurrent):
        for event in row:
            assert event.slack is not None
            result[str(event.item)] = (event.slack.time, str(event.slack.item or "-"))
    wanted = {item: (float(time), first) for item, time, first in map(str.split, expected.split(","))}
    assert {item: result[item] for item in wanted} == wanted
    for plain, row in zip(simulation.timeline.events, timeline.events, strict=True):
        assert [(event.item, event.start, event.end, event.cause) for event in plain] == [
            (event.item, event.start, event.end, event.cause) for event in row
        ]
        assert not any(event.slack for event in plain)  # it takes time, and few ask for it
