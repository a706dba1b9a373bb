"""Orders to measure: the same order with its backwards whole, split, or behind a recomputation, and without overlap.

A cost file is to have every kind of pass, but an order has either B or I and W, and R or not. Each of the first three
runs all devices under the same load as the order itself; the last one shows what a pass takes alone.
"""

from __future__ import annotations

import math

from evenpipe.errors import InputError
from evenpipe.schedule import Kind, Order, Pass, parts_of

BACKWARDS = ("whole", "split", "recomputed")
"""B; I, and W where the order has it, else right behind I; and B behind R."""


def with_backward(order: Order, backward: str) -> Order:
    """`order` with every backward as `backward` says, one of `BACKWARDS`; passes that run as one are taken apart."""
    if backward not in BACKWARDS:
        raise InputError(f"backward must be one of {', '.join(BACKWARDS)}, not '{backward}'")
    rows = tuple(tuple(_row(list(order.passes(device)), backward)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, order.barriers, order.forward_only)


def _row(items: list[Pass], backward: str) -> list[Pass]:
    row: list[Pass] = []
    for item in (part for joint in items for part in parts_of(joint)):
        match item.kind:
            case Kind.R:
                continue
            case Kind.W if backward != "split":
                continue
            case Kind.B if backward == "split":
                row += [_as(item, Kind.I), _as(item, Kind.W)]
            case Kind.B | Kind.I if backward == "recomputed":
                row += [_as(item, Kind.R), _as(item, Kind.B)]
            case Kind.I if backward == "whole":
                row.append(_as(item, Kind.B))
            case _:
                row.append(item)
    return row


def _as(item: Pass, kind: Kind) -> Pass:
    return Pass(kind, item.stage, item.microbatch, item.slice)


def one_by_one(order: Order) -> Order:
    """`order` with one microbatch behind the other: hardly any device computes while another one does.

    What a pass needs is of its own microbatch, so rows sorted by microbatch are sound.
    """
    rows = tuple(
        tuple(sorted((part for item in order.passes(device) for part in parts_of(item)), key=_microbatch))
        for device in range(order.devices)
    )
    return Order(order.placement, order.microbatches, rows, order.barriers, order.forward_only)


def _microbatch(item: Pass) -> float:
    """Parameters are gathered before all microbatches; their gradients are reduced behind them."""
    if item.microbatch is None:
        return -1 if item.kind is Kind.UNSHARD else math.inf
    return item.microbatch
