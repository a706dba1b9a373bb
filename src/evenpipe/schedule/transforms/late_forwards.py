"""Forwards before the first backward of a device, as late as possible without delaying others: for the offload
transform, because activations that are made later are held for a shorter time (arXiv 2503.01328, section 3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import inf

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import HOP_KINDS, ROLE, Kind, Pass, parts_of
from evenpipe.schedule.timing import EventTimes, durations, run

Times = list[list[float]]
"""By device and position."""


def late_forwards(order: Order, costs: Costs) -> tuple[Times, Times, Times]:
    """Return starts and ends of all passes in the event model, with the passes before the first backward of a device as
    late as possible without delaying others; and the earliest ends."""
    graph = Graph.of(order)
    takes = durations(order, graph, costs)
    times = run(order, graph, takes)
    start, eager_end = list(times.start), times.end
    passes = len(graph.items)
    first_backward = [
        next((n for n in range(*bounds) if _goes_back(graph.items[n])), bounds[1]) for bounds in pairwise(graph.first)
    ]
    joins = _joins(order, graph, times)
    awaited_from = [inf] * (graph.size - passes)
    """By transfer, the start of the first pass that waits for it."""
    for number in reversed(times.happened):
        if number >= passes:
            continue
        device, here, unit = graph.device_of[number], graph.site[number], graph.offset[number]
        if number < first_backward[device] < graph.first[device + 1]:
            latest = start[number + 1]
            for transfer in graph.waits[graph.site[number + 1]]:
                waited = transfer + graph.offset[number + 1]
                if times.start[waited] >= eager_end[number]:  # it is issued in between
                    latest = min(latest, start[number + 1] - takes[waited])
            for transfer in graph.feeds[here]:
                fed = transfer + unit
                latest = min(latest, awaited_from[fed - passes] - takes[fed])
            joined = bisect_left(joins[device], eager_end[number])
            if joined < len(joins[device]):
                latest = min(latest, joins[device][joined])
            start[number] = max(start[number], latest - takes[number])
        for transfer in graph.waits[here]:
            waited = transfer + unit - passes
            awaited_from[waited] = min(awaited_from[waited], start[number])
    starts = [start[first:last] for first, last in pairwise(graph.first)]
    ends = [[start[n] + takes[n] for n in range(first, last)] for first, last in pairwise(graph.first)]
    return starts, ends, [eager_end[first:last] for first, last in pairwise(graph.first)]


def _joins(order: Order, graph: Graph, times: EventTimes) -> Times:
    """Return, by device, when its collectives begin: every member issues them after its preceding passes."""
    joins: Times = [[] for _ in range(order.devices)]
    for route, numbers in graph.transfers.by_route():
        if route.kind not in HOP_KINDS:
            for device in route.members:
                joins[device] += [times.start[number] for number in numbers]
    return [sorted(row) for row in joins]


def _goes_back(item: Pass) -> bool:
    return any(part.kind is Kind.R or ROLE[part.kind] is Kind.B for part in parts_of(item))
