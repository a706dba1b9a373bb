"""The event model: an order and costs in, a timeline out.

Each device runs its row in order. A pass starts when its device is free, every pass that it needs has ended and every
transfer that it needs has completed; a transfer completes `Costs.transfer_time` after its last producer ended.
Transfers do not contend with each other or with compute (the full simulator models that). Orders that cannot complete
raise `DeadlockError`, which shows where every device stops.

Every pass and every need is visited once, so the time is linear in their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .costs import Costs, PassTimes
from .deadlock import DeadlockError
from .graph import Graph
from .order import Order
from .timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When everything in a graph ran.

    start, end: by number. A transfer starts when its data is ready.
    happened: the numbers in an order compatible with all needs, also among simultaneous events; passes when they run,
        transfers when their data is ready.
    """

    start: list[float]
    end: list[float]
    happened: list[int]

    def sequence(self) -> list[int]:
        """Return the place of each number in `happened`."""
        sequence = [0] * len(self.start)
        for place, number in enumerate(self.happened):
            sequence[number] = place
        return sequence


def time_order(order: Order, costs: Costs) -> Timeline:
    """Run `order` in the event model.

    Raises DeadlockError if it cannot complete, InputError if `costs` lack a kind or have lists of the wrong length.
    """
    graph, times = timed(order, costs)
    rows = []
    for device in range(order.devices):
        numbers = range(graph.first[device], graph.first[device + 1])
        rows.append(tuple(Event(device, graph.items[n], times.start[n], times.end[n]) for n in numbers))
    placement = order.placement
    return Timeline(
        tuple(rows),
        costs.stage_bytes(placement),
        placement=placement,
        exchange=costs.exchange_times(placement),
        token_factors=costs.token_factors,
    )


def timed(order: Order, costs: Costs) -> tuple[Graph, EventTimes]:
    """Return the graph of `order`, and when everything in it runs. Raises as `time_order` does."""
    graph = Graph.of(order)
    return graph, run(order, graph, durations(order, graph, costs))


def durations(order: Order, graph: Graph, costs: Costs) -> list[float]:
    """Return the duration of everything in the graph of `order`, by number."""
    slices = order.slices if costs.slices else 1
    times = PassTimes(costs, order.placement, order.slices)
    known: dict[int, float] = {}  # by site, and slice where these differ
    takes = []
    for item, site, device in zip(graph.items, graph.site, graph.device_of, strict=True):
        key = site if slices == 1 else site * slices + item.slice
        duration = known.get(key)
        if duration is None:
            duration = known[key] = times.of(item, device)
        takes.append(duration)
    each = costs.by_slice(slices)
    for route, numbers in graph.transfers.by_route():
        carried = [one.transfer_time(route.kind) for one in each]
        if len(numbers) < slices:  # irregular ones
            takes += [carried[min(graph.transfers.carried(number)[2], slices - 1)] for number in numbers]
        else:
            takes += carried * (len(numbers) // slices)
    return takes


def run(
    order: Order,
    graph: Graph,
    takes: Sequence[float],
    rows: Sequence[Sequence[int]] | None = None,
    *,
    absent_is_done: bool = False,
) -> EventTimes:
    """Time everything in the graph of `order`; `takes` has durations by number. Raises DeadlockError.

    rows: per device, the numbers of its passes as they run, each after those of the row that it needs; None: as in
    `order`. With `absent_is_done`, nobody waits for a missing pass.
    """
    passes = len(graph.items)
    site, offset, waits, feeds = graph.site, graph.offset, graph.waits, graph.feeds
    start, end = [0.0] * graph.size, [0.0] * graph.size
    happened: list[int] = []
    missing = [0] * passes + graph.producers(absent_is_done=absent_is_done)  # producers that have not run
    standing: dict[int, list[int]] = {}  # transfer -> devices whose next pass waits for it
    if rows is None:
        rows = [range(*ends) for ends in zip(graph.first, graph.stop, strict=False)]
    heads, free = [0] * order.devices, [0.0] * order.devices  # passes of each device that have run, and when it is free
    waking = list(reversed(range(order.devices)))  # devices whose next pass may be ready
    while waking:
        device = waking.pop()
        clock, row = free[device], rows[device]
        for place in range(heads[device], len(row)):
            number = row[place]
            here, unit = site[number], offset[number]
            begin, awaited = clock, -1
            for transfer in waits[here]:
                if missing[transfer + unit] > 0:
                    awaited = transfer + unit
                    break
                arrival = end[transfer + unit]
                begin = arrival if arrival > begin else begin
            if awaited >= 0:
                standing.setdefault(awaited, []).append(device)
                heads[device] = place
                break
            start[number] = begin
            end[number] = clock = begin + takes[number]
            happened.append(number)
            for transfer in feeds[here]:
                fed = transfer + unit
                start[fed] = clock if clock > start[fed] else start[fed]
                missing[fed] -= 1
                if missing[fed] == 0:
                    # All data is there: it completes, and the passes that wait for it may go on.
                    end[fed] = start[fed] + takes[fed]
                    happened.append(fed)
                    waking += standing.pop(fed, ())
        else:
            heads[device] = len(row)
        free[device] = clock
    if heads != [end - first for first, end in pairwise(graph.first)]:
        raise DeadlockError(order, heads)
    return EventTimes(start, end, happened)
