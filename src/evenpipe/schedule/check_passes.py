"""Is every pass there, once, on its device, and behind what it needs from its own row?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .dependencies import Dependencies, What
from .excerpt import neighbours
from .faults import Fault
from .flows import vocabulary_kinds
from .order import Order
from .passes import BACKWARD_KINDS, ROLE, VOCABULARY_KINDS, Item, Kind, Pass, parts_of

Rows = Sequence[Sequence[Item | None]]


def check_passes(order: Order, rows: Rows) -> Iterator[Fault]:
    """Faults of the rows of `order`, one by one; `rows` are what messages show, with the same positions."""
    for device in range(order.devices):
        positions: dict[What, dict[int, int]] = {}
        yield from _out_of_place(order, device, rows, positions)
        yield from _missing(order, device, rows, positions)


def check_own_needs(order: Order, rows: Rows) -> Iterator[Fault]:
    """Passes that stand before one of their own row that they need."""
    dependencies = Dependencies.of(order)
    for device in range(order.devices):
        row = order.rows[device]
        where = {
            (ROLE[part.kind], part.stage, part.microbatch): position
            for position, item in enumerate(row)
            for part in (parts_of(item) if item else ())
        }
        for position, item in enumerate(row):
            for part in parts_of(item) if item else ():
                rule = dependencies.rule(device, part.kind, part.stage)
                for kind, stage in (*rule.after, *rule.if_present):
                    there = where.get((ROLE[kind], stage, part.microbatch), position)
                    if there > position:
                        what = f"{part} stands before {row[there]} at position {there}, which it needs"
                        yield Fault(device, position, what, neighbours(rows, device, position))


def _out_of_place(order: Order, device: int, rows: Rows, positions: dict[What, dict[int, int]]) -> Iterator[Fault]:
    """What stands in a row and should not. The rest goes into `positions`: kind and stage -> microbatch -> position."""
    wanted = vocabulary_kinds(order.barriers, order.forward_only)
    for position, item in enumerate(order.rows[device]):
        for part in parts_of(item) if item else ():
            what = _wrong(order, device, part, wanted)
            if not what and part.microbatch is not None:
                seen = positions.setdefault((part.kind, part.stage), {})
                earlier = seen.setdefault(part.microbatch, position)
                what = "" if earlier == position else f"{part} stands at position {earlier} already"
            if what:
                yield Fault(device, position, what, neighbours(rows, device, position))


def _wrong(order: Order, device: int, item: Pass, wanted: frozenset[Kind]) -> str:
    """Why `item` does not belong on `device`, or nothing."""
    if order.forward_only and item.kind in BACKWARD_KINDS:
        return f"{item} has no place in an order that only evaluates"
    if item.kind in VOCABULARY_KINDS and item.kind not in wanted:
        return f"{item} has no place in an order with {order.barriers} barriers"
    if item.stage is not None:
        if not 0 <= item.stage < order.placement.stages:
            return f"{item} is of no stage; stages are 0 to {order.placement.stages - 1}"
        if order.placement.device_of(item.stage) != device:
            return f"{item} belongs to device {order.placement.device_of(item.stage)}"
    if item.microbatch is not None and not 0 <= item.microbatch < order.microbatches:
        return f"{item} is of no microbatch; microbatches are 0 to {order.microbatches - 1}"
    if item.slice:
        return f"{item} is a part of a sequence, but sequences are not cut"
    return ""


def _missing(order: Order, device: int, rows: Rows, positions: dict[What, dict[int, int]]) -> Iterator[Fault]:
    """What a row should have and has not, and backwards that stand there both whole and split."""

    def has(kind: Kind, stage: int | None, microbatch: int) -> bool:
        return microbatch in positions.get((kind, stage), ())

    def absent(kind: Kind, stage: int | None, microbatch: int, why: str = "") -> Fault:
        return Fault(device, None, f"{Pass(kind, stage, microbatch)} is missing{why}")

    for kind in sorted(vocabulary_kinds(order.barriers, order.forward_only)):
        for microbatch in range(order.microbatches):
            if not has(kind, None, microbatch):
                yield absent(kind, None, microbatch)
    for stage in order.placement.stages_of(device):
        for microbatch in range(order.microbatches):
            whole, inputs, weights, offloads, loads = (
                has(kind, stage, microbatch) for kind in (Kind.B, Kind.I, Kind.W, Kind.O, Kind.L)
            )
            if not has(Kind.F, stage, microbatch):
                yield absent(Kind.F, stage, microbatch)
            if order.forward_only:
                continue
            if whole and (inputs or weights):
                position = positions[Kind.I if inputs else Kind.W, stage][microbatch]
                what = f"{Pass(Kind.B, stage, microbatch)} has run whole, and a part of it stands here again"
                yield Fault(device, position, what, neighbours(rows, device, position))
            elif not (whole or inputs or weights):
                yield absent(Kind.B, stage, microbatch, ", so its activations are never released")
            elif not (whole or inputs):
                yield absent(Kind.I, stage, microbatch)
            elif not (whole or weights):
                yield absent(Kind.W, stage, microbatch, ", so its activations are never released")
            if offloads and not loads:
                yield absent(Kind.L, stage, microbatch, ", so its activations never come back")
            if loads and not offloads:
                yield absent(Kind.O, stage, microbatch)
