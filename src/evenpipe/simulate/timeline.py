"""From the numbers of the event loop to a `Timeline`."""

from __future__ import annotations

from operator import attrgetter

from evenpipe.schedule import Cause, Event, Program, Timeline, Transfer

from .loop import START, Loop
from .work import Work

NOTHING = Cause(START)


def timeline_of(
    program: Program,
    work: Work,
    loop: Loop,
    stage_bytes: tuple[float, ...] | None,
    memory: tuple[tuple[tuple[float, float], ...], ...] | None,
) -> Timeline:
    """Passes of each device as they ran, and beside them its transfers and copies by their start."""
    events, beside = [], []
    for device, row in enumerate(work.rows):
        present = [item for item in program.rows[device] if item is not None]
        issued = {~n: item for n, item in zip(row, present, strict=True) if isinstance(item, Transfer)}
        computed: list[Event] = []
        others: list[Event] = []
        for n in row:
            event = event_of(work, loop, issued, n, device)
            (computed if n >= 0 and n not in work.copy_feeds else others).append(event)
        others.sort(key=attrgetter("start"))
        events.append(tuple(computed))
        beside.append(tuple(others))
    return Timeline(tuple(events), stage_bytes, tuple(beside), memory)


def event_of(work: Work, loop: Loop, issued: dict[int, Transfer], n: int, device: int) -> Event:
    """What `device` did under number n; `issued` has its transfers by number, as it issues them."""
    if n >= 0:
        return Event(
            device, work.items[n], loop.start[n], loop.end[n], _cause(work, loop.why[n], loop.who[n], issued, device)
        )
    k = ~n
    cause = _cause(work, loop.why_of[k], loop.who_of[k], issued, device)
    return Event(device, issued[k], loop.start_of[k], loop.end_of[k], cause)


def _cause(work: Work, why: str, who: int, issued: dict[int, Transfer], device: int) -> Cause:
    if why == START:
        return NOTHING
    if who >= 0:
        return Cause(why, work.items[who], work.device_of[who])
    return Cause(why, issued[~who], device)
