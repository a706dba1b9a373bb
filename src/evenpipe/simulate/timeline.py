"""Convert the numbers of the event loop to a `Timeline`."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from evenpipe.schedule import Cause, Costs, Event, Program, Timeline, Transfer

from .loop import DEVICE, START, Loop
from .memory import memory_curves
from .work import COPIES, Work

NOTHING = Cause(START)


def timeline_of(program: Program, costs: Costs, work: Work, loop: Loop) -> Timeline:
    """Return passes of each device as they ran, and beside them its transfers and copies by their start."""
    events, beside = [], []
    behind: dict[int, Cause] = {}  # the shared cause "busy with pass n"
    for device, row in enumerate(work.rows):
        computed: list[Event] = []
        others: list[Event] = []
        issued: dict[int, Transfer] = {}
        present = (item for item in program.rows[device] if item is not None)
        for n, item in zip(row, present, strict=True):
            if isinstance(item, Transfer):
                issued[n] = item
            found = behind.get(loop.who[n]) if loop.why[n] == DEVICE else None
            cause = found or _cause(work, loop, n, issued, device)
            if cause.resource == DEVICE:
                behind[loop.who[n]] = cause
            event = Event(device, item, loop.start[n], loop.end[n], cause)
            (others if n < 0 or n in work.beside else computed).append(event)
        others.sort(key=attrgetter("start"))
        events.append(tuple(computed))
        beside.append(tuple(others))
    memory = memory_curves(program, costs, work, loop)
    copies = any(work.items[n].kind in COPIES for n in work.beside)
    alike = replace(costs, bytes=1.0, memory=None, slices={})
    on_device = memory_curves(program, alike, work, loop) if copies else None
    placement = program.placement
    return Timeline(
        tuple(events),
        costs.stage_bytes(placement),
        tuple(beside),
        memory,
        on_device,
        placement,
        costs.exchange_times(placement),
        costs.token_factors,
    )


def event_of(work: Work, loop: Loop, issued: dict[int, Transfer], n: int, device: int) -> Event:
    """Return the event of `device` with number n; `issued` has its transfers by number, as it issues them."""
    item = work.items[n] if n >= 0 else issued[n]
    return Event(device, item, loop.start[n], loop.end[n], _cause(work, loop, n, issued, device))


def _cause(work: Work, loop: Loop, n: int, issued: dict[int, Transfer], device: int) -> Cause:
    why, who = loop.why[n], loop.who[n]
    if why == START:
        return NOTHING
    if who >= 0:
        return Cause(why, work.items[who], work.device_of[who])
    return Cause(why, issued[who], device)
