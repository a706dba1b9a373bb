"""Run the forwards before the first backward of a device as late as possible without delaying other passes. The offload
transform needs this, because activations that are produced later are held for a shorter time (arXiv 2503.01328, section
3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import inf

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import ROLE, Kind, Pass, parts_of
from evenpipe.schedule.timing import timed
from evenpipe.schedule.walk import Walked

Times = list[list[float]]
"""By device and position."""


def late_forwards(order: Order, costs: Costs) -> tuple[Times, Times, Times]:
    """Starts and ends of all passes in the event model, with the passes before the first backward of a device as
    late as possible without delaying others, and the earliest ends."""
    walked = timed(order, costs)
    numbered, rule = walked.numbered, walked.numbered.rule
    takes = numbered.durations(costs)
    start, eager_end = list(walked.start), walked.end
    next_in_row = {number: next_number for row in walked.rows for number, next_number in pairwise(row)}
    may_move = {n for device, row in enumerate(walked.rows) for n in row[: _first_backward(order, device)]}
    collective_starts = _collective_starts(walked)
    awaited_from = [inf] * numbered.size
    """By transfer, the start of the first pass that waits for it."""
    for number in reversed(walked.happened):
        if numbered.is_transfer(number):
            continue
        needs = [number + step for step in numbered.needs[rule[number]]]
        if number in may_move:
            next_number = next_in_row[number]
            latest = start[next_number]
            for step in numbered.needs[rule[next_number]]:
                waited = next_number + step
                if numbered.is_transfer(waited) and walked.start[waited] >= eager_end[number]:  # issued in between
                    latest = min(latest, start[next_number] - takes[waited])
            for step in numbered.feeds[rule[number]]:
                latest = min(latest, awaited_from[number + step] - takes[number + step])
            device = numbered.device(number)
            next_start = bisect_left(collective_starts[device], eager_end[number])
            if next_start < len(collective_starts[device]):
                latest = min(latest, collective_starts[device][next_start])
            start[number] = max(start[number], latest - takes[number])
        for waited in needs:
            awaited_from[waited] = min(awaited_from[waited], start[number])
    starts = [[start[n] for n in row] for row in walked.rows]
    ends = [[start[n] + takes[n] for n in row] for row in walked.rows]
    return starts, ends, [[eager_end[n] for n in row] for row in walked.rows]


def _first_backward(order: Order, device: int) -> int:
    """The position of the first backward in a row, 0 if there is none."""
    return next((position for position, item in enumerate(order.passes(device)) if _goes_back(item)), 0)


def _collective_starts(walked: Walked) -> Times:
    """Return, by device, when its collectives begin: every member issues them after its preceding passes."""
    numbered = walked.numbered
    collective_starts: Times = [[] for _ in walked.rows]
    for route in numbered.rules.routes:
        if not route.is_hop:
            for device in route.members:
                collective_starts[device] += walked.start[numbered.place_of(route)]
    return [sorted(row) for row in collective_starts]


def _goes_back(item: Pass) -> bool:
    return any(component.kind is Kind.R or ROLE[component.kind] is Kind.B for component in parts_of(item))
