"""Transfers by hand: when they start, what they wait for, and what they do to compute beside them."""

from __future__ import annotations

import pytest
from simulated_cases import orders, random_costs

from evenpipe.errors import InputError
from evenpipe.schedule import Cause, Costs, Event, Kind, Order, Pass, Program, Timeline, generate
from evenpipe.schedule.passes import HOP_KINDS
from evenpipe.simulate import simulate


def named(events: tuple[Event, ...]) -> dict[str, tuple[float, float]]:
    return {str(event.item): (event.start, event.end) for event in events}


def causes(events: tuple[Event, ...]) -> dict[str, tuple[str, str]]:
    return {str(event.item): (event.cause.resource, str(event.cause.item)) for event in events}


# Row of device 0: F0 F1 B0 F2 B1 B2. Its forwards end at 1, 2 and later.
@pytest.mark.parametrize(
    ("costs", "hops"),
    [
        ({"p2p": 3}, {"1RECV_F0": (1, 4), "1RECV_F1": (2, 5)}),  # a fixed time: nothing queues
        ({"links": {"p2p": {"latency": 3}}}, {"1RECV_F0": (1, 4), "1RECV_F1": (4, 7)}),  # one at a time
        ({"links": {"p2p": {"latency": 1, "bandwidth": 5, "bytes": 10}}}, {"1RECV_F0": (1, 4), "1RECV_F1": (4, 7)}),
        ({"links": {"p2p": {"bandwidth": 5, "bytes": 10}, "F:0>1": {"latency": 1}}}, {"1RECV_F0": (1, 4)}),
        ({"links": {"p2p": {"latency": 3}, "B:1>0": {"latency": 9}}}, {"1RECV_F0": (1, 4)}),
    ],
)
def test_latency_bandwidth_and_queues(costs: dict[str, object], hops: dict[str, tuple[float, float]]) -> None:
    simulation = simulate(generate("1f1b", 2, 3), Costs(F=1, B=1, **costs))
    assert named(simulation.timeline.beside[1]).items() >= hops.items()
    assert named(simulation.timeline.beside[0])["0SEND_F0"] == hops["1RECV_F0"]


def test_the_two_directions_do_not_share_a_communicator() -> None:
    simulation = simulate(
        generate("1f1b", 2, 1), Costs(F=1, B=1, links={"p2p": {"latency": 2}, "B:1>0": {"latency": 9}})
    )
    assert named(simulation.timeline.beside[0]) == {"0SEND_F0": (1, 3), "0RECV_B0": (5, 14)}


def test_what_everything_waited_for() -> None:
    simulation = simulate(generate("1f1b", 2, 3), Costs(F=1, B=1, links={"p2p": {"latency": 3}}))
    assert causes(simulation.timeline.events[0])["0F0"] == ("start", "None")
    assert causes(simulation.timeline.events[0])["0F1"] == ("device", "0F0")
    assert causes(simulation.timeline.events[1])["1F0"] == ("transfer", "1RECV_F0")
    assert causes(simulation.timeline.beside[1])["1RECV_F0"] == ("device", "0F0")
    assert causes(simulation.timeline.beside[1])["1RECV_F1"] == ("communicator", "1RECV_F0")
    event = simulation.timeline.events[0][1]
    assert event.cause == Cause("device", Pass(Kind.F, 0, 0), 0)


VOCABULARY = """\
E0,ROWS0,0F0,0SEND_F0,X0,S0,STATISTICS0,C0,DX0,T0,0RECV_B0,0B0,ROW_GRADIENTS0,G0
E0,ROWS0,1RECV_F0,1F0,X0,S0,STATISTICS0,C0,DX0,1B0,1SEND_B0,T0,ROW_GRADIENTS0,G0
"""


def test_a_collective_starts_when_its_last_member_has_issued_it() -> None:
    # Device 1 needs 3 for S0 and device 0 needs 1, so the statistics of device 0 wait for those of device 1.
    costs = Costs(F=2, B=2, S=[1, 3], C=1, T=1, E=0, G=0, collectives={"statistics": 0.5, "broadcast": 0.25})
    simulation = simulate(Program.from_csv(VOCABULARY), costs)
    for device in (0, 1):
        beside = named(simulation.timeline.beside[device])
        assert beside["X0"] == (4, 4.25)
        # Device 1 has made X, so it runs S0 from 4 on; device 0 waits for X.
        assert beside["STATISTICS0"] == (7, 7.5)
    assert named(simulation.timeline.events[0])["S0"] == (4.25, 5.25)
    assert simulation.waiting[0]["STATISTICS"] == 7.5 - 5.25
    assert causes(simulation.timeline.beside[0])["STATISTICS0"] == ("device", "S0")
    assert simulation.timeline.beside[0][3].cause == Cause("device", Pass(Kind.S, None, 0), 1)


def test_compute_is_slowed_for_exactly_as_long_as_a_collective_runs() -> None:
    # dX runs from 5.5 to 7.5 and T0 of device 0 beside it: alone it takes 3, here 2 of them at half speed.
    costs = Costs(F=2, B=2, S=1, C=0.5, T=3, E=0, G=0, collectives={"reduce": 2}, overlap_slowdown=2)
    simulation = simulate(Program.from_csv(VOCABULARY), costs)
    assert named(simulation.timeline.beside[0])["DX0"] == (5.5, 7.5)
    assert named(simulation.timeline.events[0])["T0"] == (5.5, 9.5)
    assert simulation.slowed == (1, 0)


@pytest.mark.parametrize("slowdown", [1.25, 3.0])
def test_slowed_passes_do_all_their_work(slowdown: float) -> None:
    for _, order in [*orders("vocab-2", [(3, 4)]), *orders("vocab-1", [(4, 6)])]:
        costs = random_costs(order.placement, seed=11, overlap_slowdown=slowdown)
        timeline = simulate(order, costs).timeline
        alone = simulate(order, random_costs(order.placement, seed=11)).timeline
        for device in range(timeline.devices):
            for event, unslowed in zip(timeline.events[device], alone.events[device], strict=True):
                beside = overlap(timeline, device, event)
                worked = event.end - event.start - beside * (1 - 1 / slowdown)
                assert worked == pytest.approx(unslowed.end - unslowed.start)


def overlap(timeline: Timeline, device: int, event: Event) -> float:
    """How long any collective ran on `device` during `event`."""
    covered, until = 0.0, event.start
    for other in timeline.beside[device]:
        if other.item.kind not in HOP_KINDS:
            begin, end = max(other.start, until), min(other.end, event.end)
            if end > begin:
                covered, until = covered + end - begin, end
    return covered


def test_hops_slow_nothing() -> None:
    order = generate("1f1b", 3, 4)
    slowed = simulate(order, Costs(F=1, B=2, p2p=1.5, overlap_slowdown=4))
    assert slowed.makespan == simulate(order, Costs(F=1, B=2, p2p=1.5)).makespan
    assert slowed.slowed == (0, 0, 0)


def test_one_device_has_no_transfers() -> None:
    simulation = simulate(Order.from_csv("0F0,0B0"), Costs(F=1, B=2, p2p=5, links={"broadcast": {"latency": 9}}))
    assert (simulation.makespan, simulation.timeline.beside) == (3, ((),))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"links": {"B:4>3": {"latency": 1}}}, "links.B:4>3 is not a hop; devices are 0 to 1"),
        ({"engine": {"shared": [[0, 1], [2]]}}, "engine.shared has device 2; devices are 0 to 1"),
    ],
)
def test_devices_that_there_are_not(costs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(generate("1f1b", 2, 3), Costs(F=1, B=1, **costs))
