"""Check whether an order or a program is sound. Every fault is listed, not only the first.

An order is sound if every pass that its placement, units and barriers require appears exactly once on the right
device, no pass comes before one that it needs in its own row, and all devices reach the end of their rows. Every F has
its B, or its I and W, so every stored activation is released. Parameters that are gathered are there wherever they are
used, and gradients are summed when they are complete. A program also has every transfer exactly once on each of
its members, at a valid position, and completes for every way of queueing transfers (`queues`). If limits are given,
every device stays within them.

A quick proof (`proof`) covers sound schedules; only the rest is examined item by item. Completion is checked as if
missing items had been done, so that one fault does not hide others.
"""

from __future__ import annotations

from types import NoneType

from evenpipe.errors import InputError

from .check_limit import Limits, check_limits
from .check_passes import check_own_needs, check_passes
from .check_transfers import check_transfers
from .deadlock import DeadlockError
from .dependencies import Dependencies
from .faults import Fault, Report
from .graph import Graph
from .order import Order
from .passes import Pass, Rows, Transfer
from .program import Program
from .proof import passes_in_place, program_is_sound
from .queues import check_completion
from .sharding import check_sharding
from .timeline import peak_activations
from .timing import run


def check_order(order: Order, limits: Limits | None = None) -> Report:
    """Return every fault of `order`, and the most stage activations in flight on each device.

    Raises InputError for rows that contain anything but passes, and for invalid limits.
    """
    _refuse_others(order.rows, {Pass, NoneType}, "a pass")
    out_of_place, out_of_order, _ = _order_faults(order, order.rows)
    return _report(order, order, [*out_of_place, *out_of_order], limits)


def check_program(program: Program, limits: Limits | None = None, *, experts: bool = False) -> Report:
    """Return every fault of `program`, of its passes and its transfers; positions count both.

    experts: devices exchange with their copies in other replicas within F, B, I and R (the third model of `queues`).

    Raises InputError for rows that contain anything but passes and transfers, and for invalid limits.
    """
    _refuse_others(program.rows, {Pass, Transfer, NoneType}, "a pass or transfer")
    # Idle slots replace transfers, so positions stay those of the program.
    passes = tuple(tuple(item if isinstance(item, Pass) else None for item in row) for row in program.rows)
    order = Order(
        program.placement, program.microbatches, passes, program.barriers, program.forward_only, program.slices
    )
    faults: list[Fault] = []
    dependencies = Dependencies.of(program, program.sharing)
    if not program_is_sound(program, dependencies):
        out_of_place, out_of_order, graph = _order_faults(order, program.rows, dependencies)
        unplaced, misplaced = check_transfers(program, dependencies)
        faults = [*out_of_place, *out_of_order, *unplaced, *misplaced]
        if not out_of_order and not misplaced:
            faults += check_completion(program, graph, dependencies, experts=experts)
    return _report(program, order, faults, limits)


def _order_faults(
    order: Order, rows: Rows, dependencies: Dependencies | None = None
) -> tuple[list[Fault], list[Fault], Graph]:
    """Return faults of missing, extra and misplaced passes, faults in the order of rows, and the graph."""
    out_of_place: list[Fault] = []
    out_of_order: list[Fault] = []
    graph = Graph.of(order, dependencies, absent_is_done=True)
    if not passes_in_place(order, graph.places):
        out_of_place += check_passes(order, rows)
        out_of_place += check_sharding(order.placement, order.barriers, rows)
    if graph.stop != graph.first[1:]:
        out_of_order += check_own_needs(order, rows)
    try:
        run(order, graph, [0.0] * graph.size, absent_is_done=True)
    except DeadlockError as deadlock:
        out_of_order.append(deadlock.fault(rows))
    return out_of_place, out_of_order, graph


def _refuse_others(rows: Rows, accepted: set[type], what: str) -> None:
    for device, row in enumerate(rows):
        if not accepted.issuperset(map(type, row)):
            position, item = next((n, item) for n, item in enumerate(row) if type(item) not in accepted)
            raise InputError(f"device {device}, position {position}: expected {what}, not {item!r}")


def _report(schedule: Order | Program, order: Order, faults: list[Fault], limits: Limits | None) -> Report:
    if limits is not None:
        faults += check_limits(schedule, limits)
    return Report(tuple(faults), tuple(int(peak_activations(order.passes(device))) for device in range(order.devices)))
