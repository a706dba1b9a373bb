"""Convert the numbers of the event loop to a `Timeline`."""

from __future__ import annotations

from operator import attrgetter

from evenpipe.schedule import Cause, Event, Program, Timeline, Transfer

from .loop import DEVICE, START, Loop
from .memory import Curve
from .work import Work

NOTHING = Cause(START)


def timeline_of(
    program: Program,
    work: Work,
    loop: Loop,
    *,
    stage_bytes: tuple[float, ...] | None,
    memory: tuple[Curve, ...] | None,
    on_device: tuple[Curve, ...] | None,
) -> Timeline:
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
    return Timeline(tuple(events), stage_bytes, tuple(beside), memory, on_device, program.placement)


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
