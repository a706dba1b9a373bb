"""The evaluation order of any order: forwards, and what it takes to finish the loss."""

from __future__ import annotations

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, parts_of

from .list_scheduling import Timed, list_schedule
from .vocabulary import add_vocabulary


def forward_only(order: Order, costs: Costs | None = None) -> Order:
    """The forwards of `order` as they stood and, if it has vocabulary passes, E, S and C where they delay nobody.

    The vocabulary passes do not stay where training had them: without backwards in between, devices would wait. They
    are added anew, with `costs` as for `add_vocabulary`. Nor need a device with several stages take turns as in
    training: where it is shorter, each runs the earliest forward that is ready. The result has one barrier, or none as
    before; an order that only evaluates already is returned as it is. Raises DeadlockError where the forwards cannot
    complete.
    """
    if order.forward_only:
        return order
    rows = tuple(
        tuple(part for item in order.passes(device) for part in parts_of(item) if part.kind is Kind.F)
        for device in range(order.devices)
    )
    forwards = Order(order.placement, order.microbatches, rows, forward_only=True)
    if order.barriers:
        return add_vocabulary(forwards, 1, costs)
    costs = EQUAL_COSTS if costs is None else costs
    in_turn, listed = Timed.of(forwards, costs), list_schedule(forwards, forwards, None, costs)
    return listed.order if listed and listed.better_than(in_turn) else forwards
