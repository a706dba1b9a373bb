"""Traces for tests: one by hand, and those that a measurement of a simulated step would give."""

from __future__ import annotations

from dataclasses import replace

import unit_needs

from evenpipe.schedule import Costs, Kind, Pass, Program, Rules, Transfer, add_communication, generate
from evenpipe.schedule.passes import unit_of
from evenpipe.schedule.trace import Clock, CopyTime, DeviceTrace, PassTime, Trace, TransferTime, WaitTime
from evenpipe.simulate import simulate

COPIES = (Kind.O, Kind.L)
AWAITED = {Kind.D: Kind.O, Kind.B: Kind.L, Kind.I: Kind.L, Kind.R: Kind.L}


def two_devices() -> Trace:
    """One microbatch through two devices.

    Device 0: 0F0 from 0 to 2, then it issues the send (2 to 2.5) and the receive, waits until 9.5, and runs 0B0 to 12;
    device 1 waits from 0 to 3, runs 1F0 to 5, is busy otherwise until 5.25, runs 1B0 to 8, sends at 8.5.
    """
    program = add_communication(generate("1f1b", 2, 1))
    items = [{str(item): item for item in row} for row in program.rows]
    send, receive = items[0]["0SEND_F0"], items[0]["0RECV_B0"]
    arrival, back = items[1]["1RECV_F0"], items[1]["1SEND_B0"]
    first = DeviceTrace(
        0.0,
        12.5,
        (PassTime(items[0]["0F0"], 0.0, 2.0, 1.9), PassTime(items[0]["0B0"], 9.5, 12.0, 2.5)),
        (WaitTime(receive, items[0]["0B0"], 2.5, 9.5), WaitTime(send, None, 10.0, 10.0)),
        (TransferTime(send, 2.0, 2.25, 10.0), TransferTime(receive, 2.25, 2.5, 9.5)),
    )
    second = DeviceTrace(
        0.0,
        12.5,
        (PassTime(items[1]["1F0"], 3.0, 5.0, 2.0), PassTime(items[1]["1B0"], 5.25, 8.0, 2.75)),
        (WaitTime(arrival, items[1]["1F0"], 0.0, 3.0), WaitTime(back, None, 12.0, 12.0)),
        (TransferTime(arrival, 0.0, 0.0, 3.0), TransferTime(back, 8.5, 8.5, 12.0)),
        Clock(1000.0, 1e-6, 2e-5),
    )
    return Trace(program, (first, second), Costs(F=1, B=2), {"schedule": "1f1b", "vocabulary": "first-last", "step": 3})


def one_device(forwards: list[float]) -> Trace:
    """As many microbatches on one device, whose forwards take so long and whose backwards take 1."""
    program = add_communication(generate("1f1b", 1, len(forwards)))
    clock, left, passes = 0.0, iter(forwards), []
    for item in program.rows[0]:
        assert isinstance(item, Pass)
        end = clock + (next(left) if item.kind is Kind.F else 1.0)
        passes.append(PassTime(item, clock, end, end - clock))
        clock = end
    return Trace(program, (DeviceTrace(0.0, clock, tuple(passes), (), ()),), Costs(F=1, B=1))


def measured(program: Program, costs: Costs) -> Trace:
    """The trace of a step that runs exactly as `costs` say: transfers are issued at no cost, waits are exact."""
    simulation = simulate(program, costs)
    timeline, rules = simulation.timeline, Rules.of(program)
    ends: dict[tuple[int, int], float] = {}
    copies: list[dict[Pass, CopyTime]] = [{} for _ in program.rows]
    for device, row in enumerate(timeline.concurrent):
        for event in row:
            if isinstance(event.item, Pass):
                copies[device][event.item] = CopyTime(event.item, event.start, event.end)
                continue
            route = rules.route(device, event.item)
            assert route is not None
            ends[route.number, unit_of(event.item, program.slices)] = event.end
    devices = []
    for device, row in enumerate(program.rows):
        events = {event.item: event for event in timeline.events[device]}
        clock = 0.0
        passes, waits, transfers = [], [], []
        for item in row:
            if isinstance(item, Transfer):
                transfers.append(item)
                continue
            assert isinstance(item, Pass)
            if item.kind in COPIES:
                passes.append(PassTime(item, clock, clock, 0.0))
                continue
            waited = clock
            for transfer in unit_needs.waits_for(rules, item, device):
                route = rules.route(device, transfer)
                assert route is not None
                until = max(waited, ends[route.number, unit_of(transfer, program.slices)])
                waits.append(WaitTime(transfer, item, waited, until))
                waited = until
            copy = copies[device].get(replace(item, kind=AWAITED[item.kind])) if item.kind in AWAITED else None
            if copy is not None:
                waits.append(WaitTime(copy.item, item, waited, max(waited, copy.end)))
            passes.append(PassTime(item, events[item].start, events[item].end, events[item].end - events[item].start))
            clock = events[item].end
        found = {wait.transfer: wait.end for wait in reversed(waits)}
        issued = _issued(program, device, passes)
        times = tuple(TransferTime(item, issued[item], issued[item], found.get(item)) for item in transfers)
        beside = tuple(copies[device].values())
        devices.append(DeviceTrace(0.0, timeline.makespan, tuple(passes), tuple(waits), times, copies=beside))
    return Trace(program, tuple(devices), costs)


def _issued(program: Program, device: int, passes: list[PassTime]) -> dict[Transfer, float]:
    """When a device comes to each of its transfers: at the end of the pass before it."""
    clock, number = 0.0, 0
    issued = {}
    for item in program.rows[device]:
        if isinstance(item, Transfer):
            issued[item] = clock
        elif item is not None:
            clock = passes[number].end
            number += 1
    return issued
