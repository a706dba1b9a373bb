"""The evaluation order of any order: forwards, and what it takes to finish the loss."""

from __future__ import annotations

from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, parts_of

from .list_scheduling import Timed, list_schedule
from .vocabulary import add_vocabulary


def forward_only(order: Order, costs: Costs | None = None) -> Order:
    """The forwards of `order` and, if it has vocabulary passes, E, S and C where they delay nobody.

    A device with several stages need not take turns as in training: where it is shorter, each runs the earliest forward
    that is ready. Nor do the vocabulary passes stay where training had them: without backwards in between, devices
    would wait. They are added anew, with `costs` as for `add_vocabulary`. The result has one barrier, or none as
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
    costs = EQUAL_COSTS if costs is None else costs
    in_turn, listed = Timed.of(forwards, costs), list_schedule(forwards, forwards, None, costs)
    if listed and Timed.of(listed, costs).better_than(in_turn):
        forwards = listed
    return add_vocabulary(forwards, 1, costs) if order.barriers else forwards
