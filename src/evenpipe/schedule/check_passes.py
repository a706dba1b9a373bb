"""Check that every pass appears once, on its device, and after the passes of its row that it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from evenpipe.words import count

from .dependencies import Dependencies, What
from .faults import Fault, brief, neighbours
from .flows import vocabulary_kinds
from .order import DeviceRows, Order
from .passes import BACKWARD_KINDS, SHAPES, STAGE_KINDS, VOCABULARY_KINDS, Item, Kind, Pass, Rows, parts_of, unit_of
from .places import Places, unmet_in_row


def check_passes(order: Order, rows: Rows) -> Iterator[Fault]:
    """Return the faults of the rows of `order`, one by one; messages show `rows`, which have the same positions."""
    for device in range(order.devices):
        positions: dict[What, dict[int, int]] = {}
        yield from _out_of_place(order, device, rows, positions)
        yield from _missing(order, device, rows, positions)


def check_own_needs(order: Order, rows: Rows) -> Iterator[Fault]:
    """Return faults of passes that come before a pass of their row that they need."""
    dependencies = Dependencies.of(order)
    for device, row in enumerate(order.rows):
        places = Places.of(row, order.units, slices=order.slices)
        for position, part, there in unmet_in_row(places, row, 0, partial(dependencies.rule, device)):
            if there is not None:
                what = f"{part} comes before {brief(row[there])} at position {there}, which it needs"
                if there == position:
                    what = f"{part} comes before the part of {brief(row[there])} that it needs"
                yield Fault(device, position, what, neighbours(rows, device, position))


def _out_of_place(order: Order, device: int, rows: Rows, positions: dict[What, dict[int, int]]) -> Iterator[Fault]:
    """Return faults of items that do not belong in a row. Others go into `positions`: what -> unit -> position."""
    for position, item in enumerate(order.rows[device]):
        for part in parts_of(item) if item else ():
            what = wrong_pass(order, device, part)
            if not what and part.microbatch is not None:
                seen = positions.setdefault((part.kind, part.stage), {})
                unit = unit_of(part, order.slices)
                if unit in seen:
                    what = f"{part} is already at position {seen[unit]}"
                seen.setdefault(unit, position)
            if what:
                yield Fault(device, position, what, neighbours(rows, device, position))


def wrong_pass(order: DeviceRows, device: int, item: Pass) -> str:
    """Return why `item` does not belong on `device`, or an empty text."""
    if order.forward_only and item.kind in BACKWARD_KINDS:
        return f"{item} is not allowed in an order that only evaluates"
    if item.kind in VOCABULARY_KINDS and item.kind not in vocabulary_kinds(order.barriers, order.forward_only):
        return f"{item} is not allowed in an order with {count(order.barriers, 'barrier')}"
    if item.kind is Kind.OVERLAP_F_B:
        return f"{item} is not a pass: it has no parts"
    if (item.stage is not None, item.microbatch is not None) != SHAPES[item.kind]:
        return f"{item} is not a pass: {item.kind} has {'a' if SHAPES[item.kind][0] else 'no'} stage and " + (
            f"{'a' if SHAPES[item.kind][1] else 'no'} microbatch"
        )
    if item.stage is not None:
        if not 0 <= item.stage < order.placement.stages:
            return f"{item} names a stage that does not exist; stages are 0 to {order.placement.last_stage}"
        if order.placement.device_of(item.stage) != device:
            return f"{item} belongs to device {order.placement.device_of(item.stage)}"
    if item.microbatch is not None and not 0 <= item.microbatch < order.microbatches:
        return f"{item} names a microbatch that does not exist; microbatches are 0 to {order.microbatches - 1}"
    return wrong_slice(item, order.slices)


def wrong_slice(item: Item, slices: int) -> str:
    """Return why `item` has a slice that does not exist, or an empty text."""
    if item.slice < slices:
        return ""
    if slices == 1:
        return f"{item} is for a slice of a sequence, but sequences are not cut"
    return f"{item} names a slice that does not exist; slices are 0 to {slices - 1}"


def _missing(order: Order, device: int, rows: Rows, positions: dict[What, dict[int, int]]) -> Iterator[Fault]:
    """Return faults of missing passes, and of backwards that appear both whole and split."""

    def absent(kind: Kind, stage: int | None, units: range, why: str = "") -> Fault:
        first, last = (Pass(kind, stage, *divmod(units[index], order.slices)) for index in (0, -1))
        what = f"{first} is missing" if first == last else f"{first} to {last} are missing"
        return Fault(device, None, what + why)

    for kind in sorted(vocabulary_kinds(order.barriers, order.forward_only)):
        there = positions.get((kind, None), {})
        for units in runs(there, order.units):
            if units[0] not in there:
                yield absent(kind, None, units)
    for stage in order.placement.stages_of(device):
        found = {kind: positions.get((kind, stage), {}) for kind in sorted(STAGE_KINDS)}
        for units in runs(set().union(*found.values()), order.units):
            has = {kind: units[0] in there for kind, there in found.items()}
            if not has[Kind.F]:
                yield absent(Kind.F, stage, units)
            if order.forward_only:
                continue
            if has[Kind.B] and (has[Kind.I] or has[Kind.W]):
                position = found[Kind.I if has[Kind.I] else Kind.W][units[0]]
                whole = Pass(Kind.B, stage, *divmod(units[0], order.slices))
                what = f"{whole} has run whole, and a part of it appears here again"
                yield Fault(device, position, what, neighbours(rows, device, position))
            elif not (has[Kind.B] or has[Kind.I] or has[Kind.W]):
                yield absent(Kind.B, stage, units, ", so its activations are never released")
            elif not (has[Kind.B] or has[Kind.I]):
                yield absent(Kind.I, stage, units)
            elif not (has[Kind.B] or has[Kind.W]):
                yield absent(Kind.W, stage, units, ", so its activations are never released")
            for kind, why in _WITHOUT.items() if any(has[kind] for kind in _WITHOUT) else ():
                if not has[kind]:
                    yield absent(kind, stage, units, why)


def runs(there: Collection[int], units: int) -> Iterator[range]:
    """Return the units that are not `there`, grouped: single ones up to `LISTED`, longer gaps as ranges."""
    before = 0
    for unit in (*sorted(there), units):
        gap = range(before, unit)
        if len(gap) > LISTED:
            yield gap
        else:
            yield from (range(i, i + 1) for i in gap)
        if unit < units:
            yield range(unit, unit + 1)
        before = unit + 1


_WITHOUT = {
    Kind.O: ", so its activations are not on the host",
    Kind.D: ", so the copied memory is never freed",
    Kind.L: ", so its activations are never copied back",
}
LISTED = 100
"""Most missing units of a gap that are listed one by one."""
