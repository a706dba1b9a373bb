"""Simplified costs, also used to arrange orders, because they preserve the pattern of an order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .costs import Costs
from .passes import Kind
from .placement import Placement

EQUAL = 1e-6
"""F, I and W count as equal if they differ by no more than this, relative to their mean on the longest stage."""

FINE, COARSE = 10**6, 5
"""Quantization steps per mean pass, for times used to arrange orders. FINE only removes differences between machines
that compute the times; with COARSE, passes that end at nearly the same time end at the same time."""


def quantized_costs(costs: Costs, placement: Placement, parts: int = FINE) -> Costs:
    """Times of passes and transfers, rounded to whole units of 1 / `parts` of a stage's mean pass."""
    times = costs.stage_times(placement)
    split = [time for kind in (Kind.F, Kind.I, Kind.W) for time in times[kind] or ()]
    unit = sum(split) / len(split) / parts

    def whole(time: Any) -> Any:
        if isinstance(time, tuple):
            return tuple(map(whole, time))
        return None if time is None else float(round(time / unit))

    kinds = ("F", "B", "I", "W", "S", "C", "T", "E", "G")
    return Costs(
        **{name: whole(getattr(costs, name)) for name in kinds},
        p2p=whole(costs.p2p),
        collectives={name: whole(time) for name, time in costs.collectives.items()},
        slices=costs.slices,
    )


def simplified_costs(costs: Costs, placement: Placement) -> tuple[Costs, Costs] | None:
    """Costs with equal F, I and W per stage and no transfer times, and coarsely quantized costs; None if F, I and W
    are already equal. Both use the mean over slices."""
    costs = costs.on_average
    times = costs.stage_times(placement)
    forward, inputs, weights = times[Kind.F], times[Kind.I], times[Kind.W]
    if forward is None or inputs is None or weights is None:
        return None
    passes = list(zip(forward, inputs, weights, strict=True))
    mean_times = tuple(sum(three) / 3 for three in passes)
    if max(max(three) - min(three) for three in passes) <= EQUAL * max(mean_times):
        return None
    backward = tuple(2 * time for time in mean_times)
    even = replace(
        costs, F=mean_times, B=backward, I=mean_times, W=mean_times, p2p=0.0, collectives={}, links={}, sharding={}
    )
    return even, quantized_costs(costs, placement, COARSE)
