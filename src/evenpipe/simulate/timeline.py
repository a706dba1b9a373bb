"""Convert the numbers of the event loop to a `Timeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from evenpipe.schedule import Cause, Costs, Event, Item, Program, Slack, Timeline, Transfer

from .loop import DEVICE, START, Loop
from .memory import memory_curves
from .slack import Slacks
from .work import COPIES, Work

NOTHING = Cause(START)
NO_ITEMS: Mapping[int, Item] = {}
NO_SLACK: Slacks = {}


def timeline_of(program: Program, costs: Costs, work: Work, loop: Loop, late: Slacks = NO_SLACK) -> Timeline:
    """The passes of each device in the order in which they ran, and its transfers and overlapped passes by start.

    late: the slack of all events, to be included in the timeline.
    """
    rows, overlapped_rows = [], []
    busy_causes: dict[int, Cause] = {}  # the shared cause "busy with pass n"
    for device, row in enumerate(work.rows):
        computed: list[Event] = []
        overlapped: list[Event] = []
        present = (item for item in program.rows[device] if item is not None)
        items: dict[int, Item] = dict(zip(row, present, strict=True))
        for n, item in items.items():
            cause = busy_causes.get(loop.who[n]) if loop.why[n] == DEVICE else None
            if cause is None:
                cause = cause_of(work, loop, n, device, items)
                if cause.resource == DEVICE:
                    busy_causes[loop.who[n]] = cause
            slack = _slack(work, *late[n]) if late else None
            event = Event(device, item, loop.start[n], loop.end[n], cause, slack)
            (overlapped if n in work.overlapped or isinstance(item, Transfer) else computed).append(event)
        overlapped.sort(key=attrgetter("start"))
        rows.append(tuple(computed))
        overlapped_rows.append(tuple(overlapped))
    memory = memory_curves(program, costs, work, loop)
    copies = any(kind in COPIES for kind in work.overlapped.values())
    uniform = replace(costs, bytes=1.0, memory=None, slices={})
    on_device = memory_curves(program, uniform, work, loop) if copies else None
    placement = program.placement
    return Timeline(
        tuple(rows),
        costs.stage_bytes(placement),
        tuple(overlapped_rows),
        memory,
        on_device,
        placement,
        costs.exchange_times(placement),
        costs.token_factors,
    )


def _slack(work: Work, time: float, first: int | None) -> Slack:
    return Slack(time) if first is None else Slack(time, work.item(first), work.numbered.device(first))


def cause_of(work: Work, loop: Loop, n: int, device: int, items: Mapping[int, Item] = NO_ITEMS) -> Cause:
    """Why a pass, or a transfer of a device, did not start earlier.

    items: the known items of the device, by number.
    """
    why, who = loop.why[n], loop.who[n]
    if why == START:
        return NOTHING
    if who in items or work.numbered.is_transfer(who):
        return Cause(why, items.get(who) or work.numbered.item(who, device), device)
    return Cause(why, work.item(who), work.numbered.device(who))
