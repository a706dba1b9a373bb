"""Split consecutive layers over devices, either evenly or so that the busiest device has the least work.

The second is a dynamic program over the points between layers, as in PHAZE (arXiv 2407.13143, section 4). The position
of a device in the pipeline determines how many microbatches are in flight there, so a layer needs less memory the
closer it is to the output layer. The objectives, in order: the time of the busiest device, the memory of the fullest
device, how even the times are, and the total memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import inf

from evenpipe.errors import InputError
from evenpipe.words import count, refused

from .held import peak_activations
from .order import Order
from .placement import Placement

Load = Callable[[int, int, int], tuple[float, float]]
"""Time and memory of a device that holds the layers from `first` (inclusive) to `last` (exclusive): (device, first,
last). Neither decreases with more layers; infinite if the device cannot hold them."""

NEARLY = 1 + 1e-12
"""Sums of the same times in a different order differ by less than this factor."""


def even_split(layers: int, devices: int) -> tuple[int, ...]:
    """The layers per device, as equal as possible; the first devices get the remainder.

    Raises InputError when there are fewer layers than devices.
    """
    if devices < 1:
        raise refused("devices", devices, "at least 1")
    if layers < devices:
        raise InputError(
            f"layers is {layers}, too few for {count(devices, 'device')}; use at most {count(layers, 'device')}"
        )
    share, remainder = divmod(layers, devices)
    return tuple(share + (device < remainder) for device in range(devices))


def in_flight_per_layer(order: Order) -> tuple[float, ...]:
    """The peak number of microbatches in flight per layer on each device, averaged over its stages, for an order
    without vocabulary passes."""
    placement = order.placement
    return tuple(
        peak_activations(order.passes(device)) / len(placement.stages_of(device)) for device in range(order.devices)
    )


def splits_by_cost(
    layer_costs: Sequence[float], placement: Placement, head: float, in_flight: Sequence[float]
) -> tuple[tuple[int, ...], ...]:
    """The layers per stage that minimise the time of the busiest device: the mode `redistribute`.

    With one stage per device, the result is the best split. If devices hold several stages, the best split depends on
    the order, so there are several candidates: those with the shortest time of the busiest device, ties broken by the
    least memory or by the most layers on the first devices (here every layer takes the mean time), and the one with the
    shortest time of the busiest stage.

    layer_costs: time of each layer, forward and backward. head: the same for the output layer, on the last stage's
    device. in_flight: by device, the microbatches in flight per layer, as in `in_flight_per_layer`. A stage may get no
    layer.

    Raises InputError for a negative or infinite cost.
    """
    for name, costs in (("layer_costs", layer_costs), ("head", [head])):
        for cost in costs:
            if not 0 <= cost < inf:
                raise refused(name, cost, "finite and at least 0")
    layers, devices, stages = len(layer_costs), placement.devices, placement.stages
    cumulative = [0.0, *accumulate(map(float, layer_costs))]

    def load_of(cumulative: Sequence[float], last: int, weights: Sequence[float]) -> Load:
        def load(index: int, first: int, end: int) -> tuple[float, float]:
            return cumulative[end] - cumulative[first] + head * (index == last), weights[index] * (end - first)

        return load

    by_stage = [in_flight[device] for device in placement.stage_device]
    shortest_stage = best_split(
        layers, stages, load_of(cumulative, stages - 1, by_stage), alike=len(set(layer_costs)) == 1
    )
    if stages == devices:
        return (shortest_stage,)
    mean = cumulative[-1] / layers if layers else 0.0
    means = [mean * layer_count for layer_count in range(layers + 1)]
    loads = [load_of(means, placement.last_device, weights) for weights in (in_flight, [1.0] * devices)]
    splits = [over_stages(best_split(layers, devices, load, alike=True), placement, head, mean) for load in loads]
    splits.append(shortest_stage)
    return tuple(dict.fromkeys(splits))


def over_stages(held: Sequence[int], placement: Placement, head: float, layer: float) -> tuple[int, ...]:
    """The layers per stage if each device spreads its layers over its stages so that the longest stage is as short as
    possible. Later stages get the remainder, because they have fewer microbatches in flight. head, layer: time of the
    output layer and of a layer."""
    counts = [0] * placement.stages
    for device, layers in enumerate(held):
        times = {stage: head * (stage == placement.last_stage) for stage in placement.stages_of(device)}
        for _ in range(layers):
            stage = min(times, key=lambda stage: (times[stage], -stage))
            times[stage] += layer
            counts[stage] += 1
    return tuple(counts)


def best_split(layers: int, devices: int, load: Load, *, alike: bool = False) -> tuple[int, ...]:
    """The layers of each device, first to last, that minimise, in this order: the time of the busiest device, the
    memory of the fullest device, the sum of squared times, the sum of memory. Ties are broken by the most layers on the
    first devices. A device may get no layer. alike: a device's load depends only on its number of layers; this is
    faster.

    Raises InputError if no split has a finite time.
    """
    minimise_maximum = _least_maximum_of_alike if alike else _least_maximum
    time = minimise_maximum(layers, devices, lambda *interval: load(*interval)[0]) * NEARLY
    if time == inf:
        raise InputError("layers: no device can have them")

    def memory_of(device: int, first: int, last: int) -> float:
        seconds, memory = load(device, first, last)
        return memory if seconds <= time else inf

    memory = minimise_maximum(layers, devices, memory_of) * NEARLY
    return _most_even(layers, devices, load, time, memory)


def _least_maximum(layers: int, devices: int, cost: Callable[[int, int, int], float]) -> float:
    """The smallest possible value of the highest cost of any device.

    `best[stop]` is this value for the devices so far and the first `stop` layers. It increases with `stop`, and the
    cost of the next device decreases with its first layer, so the best first layer is where they cross, and it
    increases with `stop`.
    """
    best = [0.0] + [inf] * layers
    for device in range(devices):
        current, first = [], 0
        for stop in range(layers + 1):
            while first < stop and best[first] < cost(device, first, stop):
                first += 1
            highest = max(best[first], cost(device, first, stop))
            if first:
                highest = min(highest, max(best[first - 1], cost(device, first - 1, stop)))
            current.append(highest)
        best = current
    return best[-1]


def _least_maximum_of_alike(layers: int, devices: int, cost: Callable[[int, int, int], float]) -> float:
    """The same if only the number of layers counts: each layer goes to the device whose cost is then the lowest."""
    highest = max(cost(device, 0, 0) for device in range(devices))
    held = [0] * devices
    following = [(cost(device, 0, 1), device) for device in range(devices)] if layers else []
    heapify(following)
    for _ in range(layers):
        device_cost, device = following[0]
        highest = max(highest, device_cost)
        held[device] += 1
        if held[device] < layers:  # otherwise it has all of them
            heapreplace(following, (cost(device, 0, held[device] + 1), device))
    return highest


def _most_even(layers: int, devices: int, load: Load, time: float, memory: float) -> tuple[int, ...]:
    """The split within these limits with the smallest sum of squared times, then the smallest sum of memory, then the
    most layers on the first devices, by dynamic programming over devices and layers."""

    def fits(device: int, first: int, last: int) -> bool:
        seconds, held = load(device, first, last)
        return seconds <= time and held <= memory

    earliest = [layers]  # by device, last to first: its first layer if it and later devices hold as many as fit
    for device in reversed(range(devices)):
        first = earliest[-1]
        while first and fits(device, first - 1, earliest[-1]):
            first -= 1
        earliest.append(first)
    earliest.reverse()
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}  # by layers placed so far: sums of squared times, of memory
    chosen: list[dict[int, int]] = []
    for device in range(devices):
        current: dict[int, tuple[float, float]] = {}
        count: dict[int, int] = {}
        for first, (squares, held) in sorted(best.items(), reverse=True):
            for stop in range(max(first, earliest[device + 1]), layers + 1):
                seconds, device_memory = load(device, first, stop)
                if seconds > time or device_memory > memory:
                    break
                candidate, known = (squares + seconds * seconds, held + device_memory), current.get(stop)
                if known is None or _is_less(candidate, known):
                    current[stop], count[stop] = candidate, stop - first
        best = current
        chosen.append(count)
    split, layer = [], layers
    for count in reversed(chosen):
        split.append(count[layer])
        layer -= count[layer]
    return tuple(reversed(split))


def _is_less(left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Compare the first numbers, or the second numbers if the first are nearly equal."""
    if left[0] * NEARLY < right[0]:
        return True
    return left[0] <= right[0] * NEARLY and left[1] * NEARLY < right[1]
