"""Costs as integers, for integer solvers.

Times with few digits become integers exactly: 0.4 and 1 become 2 and 5, in units of 0.2. If no unit of at least a
millionth of the longest time divides all of them, each time is rounded *down* to a multiple of a millionth of the
longest: lower bounds are then valid for the true times too, and an order that is found is timed again with the true
times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from evenpipe.schedule.costs import Cost, Costs
from evenpipe.schedule.passes import TransferKind

RESOLUTION = 10**6
"""The longest time in units, at most."""

_CARRIES = {
    "broadcast": TransferKind.X,
    "statistics": TransferKind.STATISTICS,
    "reduce": TransferKind.DX,
    "embedding": TransferKind.ROWS,
}
KINDS = ("F", "B", "I", "W", "S", "C", "T", "E", "G")


@dataclass(frozen=True, slots=True)
class WholeCosts:
    """`costs` with integers instead of times; 1 is `unit` of the original costs. exact: no time was rounded."""

    costs: Costs
    unit: float
    exact: bool

    @classmethod
    def of(cls, costs: Costs, used: str = "FBIWSCTEG") -> WholeCosts:
        """Return the largest integer costs that do not exceed `costs`, for the kinds of pass in `used`; the unit is
        chosen for these only.

        Collectives belong to the vocabulary kinds.
        """
        collectives = {name: costs.transfer_time(kind) for name, kind in _CARRIES.items() if "S" in used}
        unused: dict[str, Any] = dict.fromkeys(set(KINDS) - set(used))
        costs = replace(
            costs, **unused, p2p=costs.transfer_time(TransferKind.SEND_F), collectives=collectives, links={}
        )
        # Use the decimal digits that a person writes, not the binary value: 0.4 is 2/5.
        values = [*(getattr(costs, name) for name in KINDS), costs.p2p, tuple(collectives.values())]
        listed = (value if isinstance(value, tuple) else (value,) for value in values)
        times = [Fraction(repr(time)) for time in chain.from_iterable(listed) if time]
        if not times:
            return cls(costs, 1.0, True)
        scale = Fraction(math.lcm(*(time.denominator for time in times)))
        scale /= math.gcd(*(int(time * scale) for time in times))
        exact = max(times) * scale <= RESOLUTION
        if not exact:
            scale = RESOLUTION / max(times)

        def whole(time: float) -> float:
            return float(math.floor(Fraction(repr(time)) * scale))

        kinds = {name: _each(getattr(costs, name), whole) for name in KINDS}
        collectives = {name: whole(time) for name, time in collectives.items()}
        scaled = replace(costs, **kinds, p2p=whole(costs.p2p), collectives=collectives)  # type: ignore[arg-type]
        return cls(scaled, float(1 / scale), exact)


def _each(value: Cost | None, change: Callable[[float], float]) -> Cost | None:
    return tuple(map(change, value)) if isinstance(value, tuple) else None if value is None else change(value)
