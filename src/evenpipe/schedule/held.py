"""What a device holds: along its row, and over time. All sums of memory over a schedule are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby
from operator import itemgetter

from .passes import Item, Pass, parts_in
from .rules import IN_FLIGHT

Curve = tuple[tuple[float, float], ...]
"""(time, held from then on), by time."""


def held_along(row: Iterable[Item | None], change: Callable[[Pass], float]) -> Iterator[tuple[int, float, float]]:
    """For each pass of a row: its position, the most that is held while it runs, and what is held after it.

    change: what a pass adds; below 0 for what it releases. Passes that run as one come in the order in which they
    start.
    """
    held = 0.0
    for position, item in enumerate(row):
        if isinstance(item, Pass):
            most = held
            for part in item.parts or (item,):
                held += change(part)
                if held > most:  # noqa: PLR1730  # quicker than max
                    most = held
            yield position, most, held


def peak_activations(
    row: Iterable[Item | None], weights: tuple[float, ...] | None = None, factors: tuple[float, ...] = ()
) -> float:
    """The most stage activations held while a device runs `row`, or the most bytes, with `weights` per stage and
    `factors` on them per slice.

    A forward stores one; a full backward releases it, or W if the backward is split. A row without backwards evaluates
    and stores nothing.
    """
    parts = [part for part in parts_in(row) if part.kind in IN_FLIGHT]
    changes: list[float] = [IN_FLIGHT[part.kind] for part in parts]
    if min(changes, default=0) >= 0:
        return 0.0
    if weights:
        changes = [
            change * weights[part.stage] * factor_of(part, factors) if part.stage is not None else change
            for part, change in zip(parts, changes, strict=True)
        ]
    return max(accumulate(changes, initial=0.0))


def factor_of(part: Pass, factors: tuple[float, ...]) -> float:
    """The factor of a pass among those of all slices; 1 if there are none."""
    return factors[part.slice] if factors else 1.0


def held_over_time(changes: Iterable[tuple[float, int, float]]) -> Curve:
    """The curve of changes: time, rank of those at the same time, and what is added.

    Ranks only decide in which order floating-point numbers are added.
    """
    held = 0.0
    curve = []
    for time, those in groupby(sorted(changes), key=itemgetter(0)):
        for _, _, added in those:
            held += added
        curve.append((time, held))
    return tuple(curve)
