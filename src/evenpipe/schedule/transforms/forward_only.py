"""The evaluation order of any order: its forwards, and of the vocabulary passes those that end in a loss."""

from __future__ import annotations

from collections.abc import Iterator

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, parts_of

_KEPT = frozenset({Kind.F, Kind.E, Kind.S, Kind.C})


def forward_only(order: Order) -> Order:
    """`order` without what only training needs: F, and with vocabulary passes E, S and C, stay where they stood.

    C finishes the loss. With two barriers that is how T opens, so a C takes the place of each T; either way the result
    has one barrier. An order that only evaluates already is returned as it is.
    """
    if order.forward_only:
        return order
    rows = tuple(tuple(_kept(order, device)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, min(order.barriers, 1), forward_only=True)


def _kept(order: Order, device: int) -> Iterator[Pass]:
    for item in order.passes(device):
        for part in parts_of(item):
            if part.kind in _KEPT:
                yield part
            elif part.kind is Kind.T and order.barriers == 2:
                yield Pass(Kind.C, None, part.microbatch, part.slice)
