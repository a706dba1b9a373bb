"""Orders of named schedules for a case, which are the start of a search and its baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule.generators import SCHEDULES
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, parts_in
from evenpipe.schedule.registry import generate, options_of
from evenpipe.schedule.timeline import Timeline
from evenpipe.schedule.timing import time_order
from evenpipe.schedule.transforms.vocabulary import add_vocabulary

from .optimal_order import OrderProblem


@dataclass(frozen=True, slots=True)
class NamedOrder:
    """A named schedule as an answer to a problem. `value` is what the problem minimises."""

    name: str
    order: Order
    timeline: Timeline
    value: float


def named_orders(problem: OrderProblem) -> list[NamedOrder]:
    """Return every named schedule that has the passes and placement of `problem` and respects its memory limit, best
    first; among equal values, the one with the lowest memory first.

    If the backward is split, schedules that do not split it are included, with each B replaced by I and W.
    """
    candidates: list[NamedOrder] = []
    for name in SCHEDULES:
        for base in _orders(name, problem):
            order = _in_the_same_passes(base, problem)
            if order is None:
                continue
            if problem.vocabulary.sharded:
                order = add_vocabulary(order, problem.vocabulary, problem.costs)
            timeline = time_order(order, problem.costs)
            limits = problem.max_in_flight or timeline.peak_in_flight
            if all(peak <= limit for peak, limit in zip(timeline.peak_in_flight, limits, strict=True)):
                candidates.append(NamedOrder(name, order, timeline, problem.value(timeline)))
    best = {entry.name: entry for entry in sorted(candidates, key=_rank, reverse=True)}  # per name, the last one stays
    return sorted(best.values(), key=_rank)


def _rank(candidate: NamedOrder) -> tuple[float, int]:
    return candidate.value, max(candidate.timeline.peak_in_flight)


def _orders(name: str, problem: OrderProblem) -> Iterator[Order]:
    """Return the orders of a schedule with the problem's size and placement, if there are any."""
    placement = problem.placement
    known = options_of(name)
    options: dict[str, Any] = {"stages_per_device": placement.stages // placement.devices}
    if "weight_share" in known:
        options["weight_share"] = 1.0  # a limit on activations in flight, like that of the problem
    limits: list[list[int] | None] = [None]
    if "max_in_flight" in known:
        limit_per_device = list(problem.max_in_flight or ())
        limits = [limit_per_device] if limit_per_device else [None, [2 * placement.stages] * placement.devices]
    for limit in limits:
        try:
            order = generate(
                name,
                placement.devices,
                problem.microbatches,
                costs=problem.costs,
                **options,
                **({} if limit is None else {"max_in_flight": limit}),
            )
        except InputError:
            continue  # no order of this size, or within this memory
        if order.placement == placement:
            yield order


def _in_the_same_passes(order: Order, problem: OrderProblem) -> Order | None:
    """Return `order` without joint passes, and with its backwards split if those of the problem are; None if that is
    impossible."""
    rows = []
    for device in range(order.devices):
        row: list[Pass] = []
        for component in parts_in(order.rows[device]):
            if component.kind in {Kind.I, Kind.W} and not problem.split_backward:
                return None
            if component.kind is Kind.B and problem.split_backward:
                row += [
                    Pass(Kind.I, component.stage, component.microbatch),
                    Pass(Kind.W, component.stage, component.microbatch),
                ]
            else:
                row.append(component)
        rows.append(tuple(row))
    return Order(order.placement, order.microbatches, tuple(rows))
