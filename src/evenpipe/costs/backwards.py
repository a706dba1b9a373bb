"""Orders to measure: the same order with its backwards whole, split, or behind a recomputation, and without overlap.

A cost file is to have every kind of pass, but an order has either B or I and W, and R or not. Each of the first three
runs all devices under the same load as the order itself; the last one shows what a pass takes alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Order, Pass, parts_of

BACKWARDS = ("whole", "split", "recomputed")
"""B; I, and W where the order has it, else behind the device's next I; and B behind R. W is split off to run later, and
then finds less of what it needs in caches than right behind its I."""


def with_backward(order: Order, backward: str) -> Order:
    """`order` with every backward as `backward` says, one of `BACKWARDS`; passes that run as one are taken apart."""
    if backward not in BACKWARDS:
        raise InputError(f"backward must be one of {', '.join(BACKWARDS)}, not '{backward}'")
    rows = tuple(tuple(_row(list(order.passes(device)), backward)) for device in range(order.devices))
    return Order(order.placement, order.microbatches, rows, order.barriers, order.forward_only)


def _row(items: list[Pass], backward: str) -> list[Pass]:
    row: list[Pass] = []
    waiting: list[Pass] = []  # a W that comes behind the next I
    for item in (part for joint in items for part in parts_of(joint)):
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
    """`costs` with the kinds of backward that only `other`, of another order of `with_backward`, has.

    Both with a list per kind. A forward that keeps nothing, or whose backward is split, takes another time. What the F
    of the other order takes more or less counts with the first of its kinds that are taken over, I, R or B, so that all
    passes of a microbatch take what they took; half of a pass at most, since more is no effect of caches.
    """
    assert isinstance(costs.F, tuple) and isinstance(other.F, tuple)
    missing = {kind: getattr(other, kind) for kind in "IWRB" if getattr(costs, kind) is None}
    missing = {kind: time for kind, time in missing.items() if time is not None}
    for kind in list(missing)[:1]:
        forwards = zip(missing[kind], other.F, costs.F, strict=True)
        missing[kind] = tuple(max(time / 2, time + forward - usual) for time, forward, usual in forwards)
    return replace(costs, **missing)


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
