"""The transform of sequence slices: from an order of whole microbatches to one whose sequences are cut.

    1F1B, 2 devices, 4 microbatches             2 microbatches of 2 slices
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3             0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3             1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1

Slices are units like microbatches, so an order of m n microbatches becomes one of m microbatches of n slices:

    forwards     keep their positions: they already run in the order of slices
    backwards    the k-th backward of a stage (B, or I and W) becomes that of unit b(k), with the slices of every
                 sequence in reverse; all of them move later by the same time, so that F of the last stage ends before
                 its backward begins: a whole number of intervals, which preserves the pattern of the order

Each device is then sorted by time. The result is valid: the chain of forwards does not change, the chain of backwards
moves as a whole, and every F(s, b(k)) ends before F(last, b(k)). This requires that the forwards and backwards of a
stage run in the order of microbatches, and as separate passes, which excludes DualPipeV.

1F1B becomes Seq1F1B (arXiv 2406.03488), with a bubble of (p - 1) / (n m) of the ideal step, where device r holds
1 + (p - 1 - r) / n sequences. Slices must take equal time, not have equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil

from evenpipe.errors import InputError
from evenpipe.schedule.costs import EQUAL_COSTS
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.rules import PassGroup
from evenpipe.schedule.timing import timed
from evenpipe.schedule.walk import Walked
from evenpipe.words import count, refused

from .vocabulary import interval_of

_BACK = (Kind.B, Kind.I, Kind.W)
_RANK = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}
"""Of passes that start at the same time, the one with the lower rank comes first."""


def add_slices(order: Order, slices: int) -> Order:
    """`order` with its microbatches as units: every `slices` of them are the slices of a microbatch.

    To be applied before vocabulary passes, recomputation and copies to the host. Raises InputError if the order has
    other passes than F, B, I and W of single stages, if a stage does not run them in the order of microbatches, if its
    sequences are already cut, or if `slices` does not divide its microbatches.
    """
    if slices == 1:
        return order
    _refuse_unfit(order, slices)
    walked = timed(order, EQUAL_COSTS)
    delay = _delay(order, walked, slices)
    sequence = walked.sequence()
    rows = []
    for device, numbers in enumerate(walked.rows):
        placed = []
        for number, item in zip(numbers, order.passes(device), strict=True):
            assert item.microbatch is not None
            back = item.kind in _BACK
            unit = _turned(item.microbatch, slices) if back else item.microbatch
            moved = Pass(item.kind, item.stage, *divmod(unit, slices))
            placed.append((walked.start[number] + (delay if back else 0.0), _RANK[item.kind], sequence[number], moved))
        rows.append(tuple(moved for *_, moved in sorted(placed, key=lambda entry: entry[:3])))
    return replace(order, microbatches=order.microbatches // slices, rows=tuple(rows), slices=slices)


def _turned(k: int, slices: int) -> int:
    """The unit of the k-th backward: the backwards of a microbatch run in reverse order of slices."""
    return k - k % slices + slices - 1 - k % slices


def _delay(order: Order, walked: Walked, slices: int) -> float:
    """How much later backwards run: at least 0, in whole intervals."""
    placement, groups = order.placement, walked.numbered.groups
    forward, backward = (
        groups[PassGroup(placement.last_device, kind, placement.last_stage)] for kind in (Kind.F, Kind.B)
    )
    longest = max(
        walked.end[forward + _turned(k, slices)] - walked.start[backward + k] for k in range(walked.numbered.units)
    )
    interval = interval_of(walked)
    return max(0, ceil(longest / interval - _ROUNDING)) * interval


def _refuse_unfit(order: Order, slices: int) -> None:
    if order.slices > 1:
        raise InputError(f"the order has sequences of {order.slices} slices already")
    if slices < 1 or order.microbatches % slices:
        raise refused("slices", slices, f"a number that divides the {count(order.microbatches, 'unit')} of the order")
    for item in (item for device in range(order.devices) for item in order.passes(device)):
        if item.kind not in _RANK:
            why = ", whose forwards and backwards must be passes of their own" if item.parts else ""
            raise InputError(f"sequences cannot be cut in an order with {item}{why}; expected F, B, I and W only")
    for stage, kind in _out_of_turn(order):
        raise InputError(f"sequences cannot be cut: stage {stage} does not run its {kind} in the order of microbatches")


def _out_of_turn(order: Order) -> Iterator[tuple[int | None, Kind]]:
    """The stages and kinds of passes that do not run in the order of microbatches."""
    for device in range(order.devices):
        runs: dict[tuple[int | None, Kind], list[int]] = {}
        for item in order.passes(device):
            assert item.microbatch is not None
            runs.setdefault((item.stage, item.kind), []).append(item.microbatch)
        yield from (group for group, units in runs.items() if any(a > b for a, b in pairwise(units)))


_ROUNDING = 1e-9
"""Rounding tolerance of times, in intervals."""
