"""Is an order or a program sound? Every fault is listed, not only the first.

An order is sound when every pass that its placement, microbatches and barriers call for stands exactly once on the
right device, no pass stands before one of its own row that it needs, and all devices come to the end of their rows.
Every F has its B, or its I and W, so every activation that is stored is released. A program moreover has every transfer
exactly once on each of its members, where it belongs, and completes whichever way the library queues transfers
(`queues`).

Whether rows complete is looked at when everything is in its place: without, devices would wait for what is missing.
"""

from __future__ import annotations

from .check_passes import Rows, check_own_needs, check_passes
from .check_transfers import check_transfers
from .deadlock import DeadlockError
from .faults import Fault, Report
from .graph import Graph
from .order import Order
from .passes import Pass
from .program import Program
from .queues import check_completion
from .timeline import peak_activations
from .timing import run


def check_order(order: Order) -> Report:
    """Every fault of `order`, and how many stage activations each device holds at most."""
    faults, _ = _order_faults(order, order.rows)
    return Report(tuple(faults), _in_flight(order))


def check_program(program: Program) -> Report:
    """Every fault of `program`, of its passes and of its transfers; positions count both."""
    # Idle slots in the place of transfers keep positions as they are in the program.
    passes = tuple(tuple(item if isinstance(item, Pass) else None for item in row) for row in program.rows)
    order = Order(program.placement, program.microbatches, passes, program.barriers, program.forward_only)
    faults, graph = _order_faults(order, program.rows)
    faults += check_transfers(program)
    if graph and not faults:
        faults += check_completion(program, graph)
    return Report(tuple(faults), _in_flight(order))


def _order_faults(order: Order, rows: Rows) -> tuple[list[Fault], Graph | None]:
    """Faults of the passes, and their graph if everything is in its place."""
    out_of_place = list(check_passes(order, rows))
    faults = [*out_of_place, *check_own_needs(order, rows)]
    if out_of_place:
        return faults, None
    graph = Graph.of(order)
    try:
        run(order, graph, [0.0] * graph.size)
    except DeadlockError as deadlock:
        faults.append(deadlock.fault(rows))
    return faults, graph


def _in_flight(order: Order) -> tuple[int, ...]:
    return tuple(int(peak_activations(order.passes(device))) for device in range(order.devices))
