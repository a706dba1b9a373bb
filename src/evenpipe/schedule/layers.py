"""Split consecutive layers over devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from evenpipe.errors import InputError

from .words import count


def even_split(layers: int, devices: int) -> tuple[int, ...]:
    """Return the layers per device, as equal as possible; the first devices get the remainder.

    Raises InputError when there are fewer layers than devices.
    """
    if devices < 1:
        raise InputError(f"devices must be at least 1, not {devices}")
    if layers < devices:
        raise InputError(
            f"layers is {layers}, too few for {count(devices, 'device')}; use at most {count(layers, 'device')}"
        )
    share, rest = divmod(layers, devices)
    return tuple(share + (device < rest) for device in range(devices))


def split_by_cost(
    layer_costs: Sequence[float], devices: int, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Return the layers per device that minimise the time of the slowest device: the mode `redistribute`.

    `layer_costs` has the time of each layer in turn, forward and backward; `first_extra` and `last_extra` are what the
    embedding and the output layer add to the first and to the last device. A device may get no layer. Among equally
    good splits it takes one with the least sum of squares, which is the most even.

    Raises InputError for a negative or infinite cost, and for no devices.
    """
    if devices < 1:
        raise InputError(f"devices must be at least 1, not {devices}")
    for name, costs in (("layer_costs", layer_costs), ("first_extra", [first_extra]), ("last_extra", [last_extra])):
        for cost in costs:
            if not 0 <= cost < inf:
                raise InputError(f"{name} must be finite and at least 0, not {cost}")
    before = [0.0, *accumulate(map(float, layer_costs))]
    extra = [0.0] * devices
    extra[0] += first_extra
    extra[-1] += last_extra
    limit = _shortest_limit(before, extra) * (1 + 1e-12)
    return _most_even(before, extra, limit)


def _shortest_limit(before: list[float], extra: list[float]) -> float:
    """Return the least time limit that all devices can meet, by bisection to the last bit.

    `before[k]` is the cost of the first k layers. A limit is enough if all layers are placed when each device in turn
    takes as many as fit.
    """

    def enough(limit: float) -> bool:
        layer = 0
        for more in extra:
            if more > limit:
                return False
            layer = bisect_right(before, before[layer] + (limit - more)) - 1
        return layer == len(before) - 1

    low, high = 0.0, before[-1] + sum(extra)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _most_even(before: list[float], extra: list[float], limit: float) -> tuple[int, ...]:
    """Return the split within `limit` with the least sum of squares, by dynamic programming over devices and layers."""
    layers = len(before) - 1
    best = [0.0] + [inf] * layers  # least sum of squares so far, by the number of layers placed
    taken: list[list[int]] = []
    for more in extra:
        current, count = [inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(layers + 1):
            for start in range(stop, -1, -1):
                load = before[stop] - before[start] + more
                if load > limit:
                    break
                if best[start] + load * load < current[stop]:
                    current[stop], count[stop] = best[start] + load * load, stop - start
        best = current
        taken.append(count)
    split, layer = [], layers
    for count in reversed(taken):
        split.append(count[layer])
        layer -= count[layer]
    return tuple(reversed(split))
