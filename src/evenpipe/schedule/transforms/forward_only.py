"""The evaluation order of any order: its forwards, and of the vocabulary passes those that end in a loss."""

from __future__ import annotations

from collections.abc import Iterator

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, parts_of

_KEPT = frozenset({Kind.F, Kind.E, Kind.S})


def forward_only(order: Order) -> Order:
    """`order` without what only training needs: F, and with vocabulary passes E and S, stay where they stood.

    C finishes the loss, whatever the number of barriers was. Nobody waits for it, so it follows the S of the next
    microbatch, and the statistics have all the time between to arrive. The result has one barrier, or none as before;
    an order that only evaluates already is returned as it is.
    """
    if order.forward_only:
        return order
    rows = tuple(tuple(_forwards(order, device)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, min(order.barriers, 1), forward_only=True)


def _forwards(order: Order, device: int) -> Iterator[Pass]:
    unfinished: Pass | None = None
    for item in order.passes(device):
        for part in parts_of(item):
            if part.kind in _KEPT:
                yield part
            if part.kind is Kind.S:
                if unfinished is not None:
                    yield unfinished
                unfinished = Pass(Kind.C, None, part.microbatch, part.slice)
    if unfinished is not None:
        yield unfinished
