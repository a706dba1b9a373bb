"""The communication transform: every transfer of an order, put where all its members can issue it without deadlock.

A transfer has one instant: the predicted end of its last producer. On every member it stands before the first pass
that is predicted to end later. So each row is a part of one list of all passes and transfers, sorted by these times
(equal ones as the event model came to them), in which nothing stands before what it needs. Devices that walk such
rows cannot deadlock, even if every operation blocked, whatever the number of communicators and however their library
serialises them; and a receive stands before the pass that runs while its data becomes ready.
"""

from __future__ import annotations

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Item
from evenpipe.schedule.program import Program
from evenpipe.schedule.timing import durations, run


def add_communication(order: Order, costs: Costs | None = None) -> Program:
    """The program of `order`: its passes in their order, and the transfers that they need.

    `costs` (equal ones by default) predict when passes end. Raises DeadlockError when the order cannot complete, and
    InputError when a cost is missing.
    """
    graph = Graph.of(order)
    times = run(order, graph, durations(order, graph, EQUAL_COSTS if costs is None else costs))
    passes = len(graph.items)
    rows: list[list[tuple[float, int, Item]]] = [
        [(times.end[number], times.sequence[number], graph.items[number]) for number in range(start, stop)]
        for start, stop in zip(graph.first, graph.first[1:], strict=False)
    ]
    for number, (route, microbatch, slice_) in enumerate(graph.carried, start=passes):
        instant, sequence = times.start[number], times.sequence[number]
        for device in route.members:
            rows[device].append((instant, sequence, route.transfer(device, microbatch, slice_)))
    for row in rows:
        row.sort(key=_place)
    return Program(
        order.placement,
        order.microbatches,
        tuple(tuple(item for _, _, item in row) for row in rows),
        order.barriers,
        order.forward_only,
    )


def _place(placed: tuple[float, int, Item]) -> tuple[float, int]:
    return placed[:2]
