"""What a device holds, along its row and over time. All sums of memory over a schedule are in this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby
from operator import itemgetter

from .passes import Item, Pass, parts_in
from .rules import IN_FLIGHT

Curve = tuple[tuple[float, float], ...]
"""(time, held from then on), by time."""


def held_along(row: Iterable[Item | None], change: Callable[[Pass], float]) -> Iterator[tuple[int, float, float]]:
    """For each pass of a row: its position, the peak while it runs, and the amount held after it.

    change: the amount that a pass adds, negative if it releases memory. Parts of a joint pass count in the order in
    which they start.
    """
    held = 0.0
    for position, item in enumerate(row):
        if isinstance(item, Pass):
            peak = held
            for component in item.parts or (item,):
                held += change(component)
                if held > peak:  # noqa: PLR1730  # quicker than max
                    peak = held
            yield position, peak, held


def peak_activations(
    row: Iterable[Item | None], weights: tuple[float, ...] | None = None, factors: tuple[float, ...] = ()
) -> float:
    """The most stage activations held while a device runs `row`, or the most bytes, with `weights` per stage and
    `factors` on them per slice.

    A forward stores one; a full backward releases it, or W if the backward is split. A row without backwards evaluates
    and stores nothing.
    """
    items = [item for item in parts_in(row) if item.kind in IN_FLIGHT]
    changes: list[float] = [IN_FLIGHT[item.kind] for item in items]
    if min(changes, default=0) >= 0:
        return 0.0
    if weights:
        changes = [
            change * weights[item.stage] * factor_of(item, factors) if item.stage is not None else change
            for item, change in zip(items, changes, strict=True)
        ]
    return max(accumulate(changes, initial=0.0))


def factor_of(item: Pass, factors: tuple[float, ...]) -> float:
    """The factor of the slice of a pass; 1 if there are no factors."""
    return factors[item.slice] if factors else 1.0


def held_over_time(changes: Iterable[tuple[float, int, float]]) -> Curve:
    """The curve of changes: time, rank among changes at the same time, and the amount added.

    Ranks only determine the order in which floating-point numbers are added.
    """
    held = 0.0
    curve = []
    for time, simultaneous in groupby(sorted(changes), key=itemgetter(0)):
        for _, _, added in simultaneous:
            held += added
        curve.append((time, held))
    return tuple(curve)
