"""The event model: an order and costs in, a timeline out.

Each device runs its row in order. A pass starts when its device is free, every pass that it needs has ended and every
transfer that it needs has completed; a transfer completes `Costs.transfer_time` after its last producer ended.
Transfers do not contend with each other or with compute (the full simulator models that). Orders that cannot
complete raise `DeadlockError`, which shows where every device stands.

Every pass is looked at once and every need once, so the time is linear in their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Costs, PassTimes
from .deadlock import DeadlockError
from .graph import Graph
from .order import Order
from .timeline import Event, Timeline

__all__ = ["Costs", "DeadlockError", "Event", "Run", "Timeline", "durations", "run", "time_order"]


@dataclass(frozen=True, slots=True)
class Run:
    """When everything in a graph happened, by number.

    A transfer starts when its data is ready. `sequence` numbers everything in an order that no need contradicts, also
    among things that happen at the same time.
    """

    start: list[float]
    end: list[float]
    sequence: list[int]


def time_order(order: Order, costs: Costs) -> Timeline:
    """Run `order` in the event model.

    Raises DeadlockError when it cannot complete, InputError when `costs` lack a kind or have lists of the wrong length.
    """
    graph = Graph.of(order)
    times = run(order, graph, durations(order, graph, costs))
    rows = []
    for device in range(order.devices):
        numbers = range(graph.first[device], graph.first[device + 1])
        rows.append(tuple(Event(device, graph.items[n], times.start[n], times.end[n]) for n in numbers))
    return Timeline(tuple(rows), costs.stage_bytes(order.placement))


def durations(order: Order, graph: Graph, costs: Costs) -> list[float]:
    """How long everything in the graph of `order` takes, by number."""
    times = PassTimes(costs, order.placement)
    passes = [times.of(item, device) for item, device in zip(graph.items, graph.device_of, strict=True)]
    return passes + [costs.transfer_time(route.kind) for route, _, _ in graph.carried]


def run(order: Order, graph: Graph, takes: Sequence[float]) -> Run:
    """Time everything in the graph of `order`; `takes` has durations by number. Raises DeadlockError."""
    passes, needs, feeds, device_of = len(graph.items), list(graph.needs), graph.feeds, graph.device_of
    start, end = [0.0] * len(needs), [0.0] * len(needs)
    sequence = [0] * len(needs)
    count = 0
    heads, free = graph.first[:-1], [0.0] * order.devices  # next pass of each device, and when the device is free
    waking = list(reversed(range(order.devices)))  # devices whose next pass may be ready
    while waking:
        device = waking.pop()
        head, stop, clock = heads[device], graph.first[device + 1], free[device]
        while head < stop and needs[head] == 0:
            begin = start[head] = clock if clock > start[head] else start[head]
            clock = end[head] = begin + takes[head]
            sequence[head] = count
            count += 1
            for fed in feeds[head]:
                start[fed] = clock if clock > start[fed] else start[fed]
                needs[fed] -= 1
                if fed < passes or needs[fed]:
                    continue
                # The transfer has all its data: it completes, and whoever waits for it may go on.
                arrival = end[fed] = start[fed] + takes[fed]
                sequence[fed] = count
                count += 1
                for waiting in feeds[fed]:
                    start[waiting] = arrival if arrival > start[waiting] else start[waiting]
                    needs[waiting] -= 1
                    there = device_of[waiting]
                    if needs[waiting] == 0 and there != device and heads[there] == waiting:
                        waking.append(there)
            head += 1
        heads[device], free[device] = head, clock
    if heads != graph.first[1:]:
        raise DeadlockError(order, [head - first for head, first in zip(heads, graph.first[:-1], strict=True)])
    return Run(start, end, sequence)
