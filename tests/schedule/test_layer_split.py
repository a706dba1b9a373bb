"""How many layers each device gets: against all splits of small cases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import Placement, even_split, generate, splits_by_cost
from evenpipe.schedule.layers import Load, best_split, in_flight_per_layer


def test_even() -> None:
    sizes = {(8, 4): (2, 2, 2, 2), (10, 4): (3, 3, 2, 2), (3, 3): (1, 1, 1), (5, 1): (5,), (7, 2): (4, 3)}
    assert {size: even_split(*size) for size in sizes} == sizes


def every_split(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in combinations_with_replacement(range(layers + 1), parts - 1):
        yield tuple(stop - start for start, stop in zip((0, *cut), (*cut, layers), strict=True))


def by_cost(costs: list[float], devices: int, head: float) -> tuple[int, ...]:
    """With as many microbatches in flight as 1F1B has."""
    (split,) = splits_by_cost(costs, Placement.linear(devices), head, range(devices, 0, -1))
    return split


BY_COST = [
    # costs of layers, devices, cost of the output layer, split
    ([1] * 8, 4, 0, (2, 2, 2, 2)),
    ([1] * 10, 4, 0, (2, 2, 3, 3)),  # what is left over goes where little is in flight
    ([1] * 8, 2, 8, (8, 0)),  # an output layer as long as all layers: the last device gets none
    ([1] * 8, 2, 20, (8, 0)),  # and no more can be done for it
    ([1] * 8, 2, 4, (6, 2)),
    ([1] * 16, 4, 5, (4, 5, 6, 1)),  # and no longer than the device before the last
    ([3, 1, 1, 1, 3], 3, 0, (1, 3, 1)),
    ([1] * 6, 3, 9, (2, 4, 0)),
    ([0.1] * 6, 3, 0, (2, 2, 2)),
    ([], 3, 1, (0, 0, 0)),
    ([5, 1], 1, 1, (2,)),
]


def test_by_cost() -> None:
    for costs, devices, head, split in BY_COST:
        assert by_cost(costs, devices, head) == split
    split = by_cost([1.0] * 1000, 256, 5.0)  # a large model takes no time
    assert sum(split) == 1000 and max(split[:-1]) == 5 and split[-1] == 0


def test_what_is_in_flight_follows_from_the_order() -> None:
    assert in_flight_per_layer(generate("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight_per_layer(generate("interleaved", 2, 4, stages_per_device=2)) == (2.5, 1.5)
    assert in_flight_per_layer(generate("zbv", 3, 6)) == (3, 3, 3)


def keys(load: Load, split: tuple[int, ...]) -> tuple[float, float, float, float]:
    """What the best split has the least of, in this order."""
    first, times, held = 0, [], []
    for device, count in enumerate(split):
        time, memory = load(device, first, first + count)
        times.append(time)
        held.append(memory)
        first += count
    return max(times), max(held), sum(time * time for time in times), sum(held)


def check_best(layers: int, devices: int, load: Load, *, alike: bool = False) -> None:
    every = [keys(load, split) for split in every_split(layers, devices)]
    if min(time for time, *_ in every) == inf:
        with pytest.raises(InputError, match="no device can have them"):
            best_split(layers, devices, load, alike=alike)
        return
    found = keys(load, best_split(layers, devices, load, alike=alike))
    for place, value in enumerate(found):
        least = min(one[place] for one in every)
        assert value == pytest.approx(least, rel=1e-9, abs=1e-12)
        every = [one for one in every if one[place] <= least * (1 + 1e-9) + 1e-12]


WORK = st.floats(0, 5).map(lambda value: round(value, 6))
"""None at all, or enough that `check_best` does not take it for none."""


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.integers(0, 4), WORK), max_size=7),
    WORK,
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_no_split_is_better(costs: list[float], head: float, in_flight: list[int]) -> None:
    devices, before = len(in_flight), [sum(costs[:count]) for count in range(len(costs) + 1)]

    def load(device: int, first: int, last: int) -> tuple[float, float]:
        return before[last] - before[first] + head * (device == devices - 1), in_flight[device] * (last - first)

    check_best(len(costs), devices, load)
    (split,) = splits_by_cost(costs, Placement.linear(devices), head, in_flight)
    assert keys(load, split) == pytest.approx(keys(load, best_split(len(costs), devices, load)))


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 3), max_size=7),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12), WORK), min_size=1, max_size=4),
    st.booleans(),
)
def test_no_split_is_better_with_recomputation(
    costs: list[int], devices: list[tuple[int, int, float]], alike: bool
) -> None:
    """Layers that do not fit take half as long again; and where even that does not help, no more are possible."""

    def load(device: int, first: int, last: int) -> tuple[float, float]:
        in_flight, room, beside = devices[device]
        lacking = max(0, in_flight * (last - first) - room)
        work = last - first if alike else sum(costs[first:last])
        return (work + beside + lacking / 2 if lacking <= 4 else inf), lacking

    check_best(len(costs), len(devices), load, alike=alike)


PLACEMENTS = [Placement.v_shape(2), Placement.v_shape(3), Placement.looped(2, 2), Placement.looped(2, 3)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: str(one.stage_device))
@pytest.mark.parametrize("head", [0.0, 0.7, 2.5, 6.0])
@pytest.mark.parametrize("layers", [6, 7, 9])
@pytest.mark.sampled(6)
def test_no_busiest_device_of_several_stages_is_shorter(placement: Placement, layers: int, head: float) -> None:
    """And of the shortest, the first candidate has the least in flight; the last one has the shortest stage."""
    in_flight = [placement.devices - device for device in range(placement.devices)]

    def of(split: tuple[int, ...]) -> tuple[float, float, float]:
        held = [sum(split[stage] for stage in placement.stages_of(device)) for device in range(placement.devices)]
        times = [count + head * (device == placement.last_device) for device, count in enumerate(held)]
        most = max(layers * microbatches for layers, microbatches in zip(held, in_flight, strict=True))
        return max(times), most, max(*split, split[-1] + head)

    found = splits_by_cost([1.0] * layers, placement, head, in_flight)
    every = [of(split) for split in every_split(layers, placement.stages)]
    shortest = min(time for time, *_ in every)
    assert of(found[0])[:2] == (shortest, min(held for time, held, _ in every if time == shortest))
    assert of(found[-1])[2] == min(stage for *_, stage in every)
    assert all(sum(split) == layers for split in found)


def test_devices_spread_their_layers_over_their_stages() -> None:
    """The last stage has the output layer, so the other ones of its device get more; else those behind do."""
    assert splits_by_cost([1.0] * 16, Placement.looped(4, 2), 4.0, [1.0] * 4)[0] == (2, 2, 2, 1, 3, 3, 3, 0)
    assert splits_by_cost([1.0] * 16, Placement.v_shape(4), 5.0, [1.0] * 4)[0] == (1, 2, 2, 2, 3, 3, 3, 0)


def test_impossible_splits() -> None:
    for call, message in (
        (lambda: even_split(3, 4), "layers is 3, too few for 4 devices"),
        (lambda: even_split(3, 0), "devices is 0"),
        (lambda: by_cost([1, -1], 2, 0), "layer_costs is -1; it must be finite and at least 0"),
        (lambda: by_cost([1, float("nan")], 2, 0), "layer_costs is nan; it must be finite and at least 0"),
        (lambda: by_cost([1], 2, float("inf")), "head is inf; it must be finite and at least 0"),
    ):
        with pytest.raises(InputError, match=message):
            call()
