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
    """Passes of each device as they ran, and beside them its transfers and copies by their start.

    late: the slack of all events, if they are to have it.
    """
    events, beside = [], []
    behind: dict[int, Cause] = {}  # the shared cause "busy with pass n"
    for device, row in enumerate(work.rows):
        computed: list[Event] = []
        others: list[Event] = []
        present = (item for item in program.rows[device] if item is not None)
        items: dict[int, Item] = dict(zip(row, present, strict=True))
        for n, item in items.items():
            cause = behind.get(loop.who[n]) if loop.why[n] == DEVICE else None
            if cause is None:
                cause = cause_of(work, loop, n, device, items)
                if cause.resource == DEVICE:
                    behind[loop.who[n]] = cause
            slack = _slack(work, *late[n]) if late else None
            event = Event(device, item, loop.start[n], loop.end[n], cause, slack)
            (others if n in work.beside or isinstance(item, Transfer) else computed).append(event)
        others.sort(key=attrgetter("start"))
        events.append(tuple(computed))
        beside.append(tuple(others))
    memory = memory_curves(program, costs, work, loop)
    copies = any(kind in COPIES for kind in work.beside.values())
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


def _slack(work: Work, time: float, first: int | None) -> Slack:
    return Slack(time) if first is None else Slack(time, work.item(first), work.numbered.device(first))


def cause_of(work: Work, loop: Loop, n: int, device: int, items: Mapping[int, Item] = NO_ITEMS) -> Cause:
    """Why a pass, or a transfer of a device, did not start earlier.

    items: of the device by number, as far as they are known.
    """
    why, who = loop.why[n], loop.who[n]
    if why == START:
        return NOTHING
    if who in items or work.numbered.is_transfer(who):
        return Cause(why, items.get(who) or work.numbered.item(who, device), device)
    return Cause(why, work.item(who), work.numbered.device(who))
