"""Orders for measurements: the same order with full, split or recomputed backwards, and without overlap.

A cost file should have every kind of pass, but an order has either B or I and W, and may have no R. Each of the first
three keeps all devices as busy as the order itself does; the last one shows the time of a pass that runs alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from evenpipe.schedule import Costs, Kind, Order, Pass, parts_of
from evenpipe.words import unknown

BACKWARDS = ("whole", "split", "recomputed")
"""B; I, with W where the order has it, or else after the device's next I; and B after R. W does not directly follow its
I, because it would then find more of its data in caches than it usually does."""


def with_backward(order: Order, backward: str) -> Order:
    """Return `order` with every backward as in `backward`, one of `BACKWARDS`; joint passes are separated."""
    if backward not in BACKWARDS:
        raise unknown("backward", backward, BACKWARDS)
    rows = tuple(tuple(_row(list(order.passes(device)), backward)) for device in range(order.devices))
    return replace(order, rows=rows)


def _row(items: list[Pass], backward: str) -> list[Pass]:
    row: list[Pass] = []
    waiting: list[Pass] = []  # a W after the next I
    for item in (component for joint in items for component in parts_of(joint)):
        match item.kind:
            case Kind.R:
                continue
            case Kind.W if backward != "split":
                continue
            case Kind.B if backward == "split":
                row += [_as(item, Kind.I), *waiting]
                waiting = [_as(item, Kind.W)]
            case Kind.B | Kind.I if backward == "recomputed":
                row += [_as(item, Kind.R), _as(item, Kind.B)]
            case Kind.I if backward == "whole":
                row.append(_as(item, Kind.B))
            case _:
                row.append(item)
    return row + waiting


def _as(item: Pass, kind: Kind) -> Pass:
    return Pass(kind, item.stage, item.microbatch, item.slice)


def completed(costs: Costs, other: Costs) -> Costs:
    """Return `costs` with the kinds of backward that only `other` has, which was measured with another order of
    `with_backward`.

    Both have a list per kind. A forward that saves nothing, or whose backward is split, takes a different time. The
    difference in F between the two orders is added to the first kind copied from `other`, I, R or B, so that the total
    time of a microbatch is unchanged. At most half of a pass is subtracted, because caches do not explain a larger
    difference.
    """
    assert isinstance(costs.F, tuple) and isinstance(other.F, tuple)
    missing = {kind: getattr(other, kind) for kind in "IWRB" if getattr(costs, kind) is None}
    missing = {kind: time for kind, time in missing.items() if time is not None}
    for kind in list(missing)[:1]:
        forwards = zip(missing[kind], other.F, costs.F, strict=True)
        missing[kind] = tuple(max(time / 2, time + forward - usual) for time, forward, usual in forwards)
    return replace(costs, **missing, slices={**other.slices, **costs.slices})


def one_by_one(order: Order) -> Order:
    """Return `order` with one microbatch after the other, so that devices hardly ever compute at the same time.

    A pass depends only on passes of its own microbatch, so rows sorted by microbatch are valid.
    """
    rows = tuple(
        tuple(sorted((component for item in order.passes(device) for component in parts_of(item)), key=_microbatch))
        for device in range(order.devices)
    )
    return replace(order, rows=rows)


def _microbatch(item: Pass) -> float:
    """Parameters are gathered before all microbatches; their gradients are reduced after them."""
    if item.microbatch is None:
        return -1 if item.kind is Kind.UNSHARD else math.inf
    return item.microbatch
