"""How many layers each device gets."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import even_split, split_by_cost


@pytest.mark.parametrize(
    ("layers", "devices", "split"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (3, 3, (1, 1, 1)), (5, 1, (5,)), (7, 2, (4, 3))],
)
def test_even(layers: int, devices: int, split: tuple[int, ...]) -> None:
    assert even_split(layers, devices) == split


@pytest.mark.parametrize(
    ("layers", "devices", "message"), [(3, 4, "layers is 3, too few for 4 devices"), (3, 0, "devices must be")]
)
def test_impossible_even_splits(layers: int, devices: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        even_split(layers, devices)


@pytest.mark.parametrize(
    ("costs", "devices", "first", "last", "split"),
    [
        ([1] * 8, 4, 0, 0, (2, 2, 2, 2)),
        ([1] * 8, 2, 0, 8, (8, 0)),  # a head as long as all layers: the last device gets none
        ([1] * 8, 2, 0, 20, (8, 0)),  # and no more can be done for it
        ([1] * 8, 2, 0, 4, (6, 2)),
        ([1] * 8, 2, 4, 0, (2, 6)),
        ([1] * 9, 3, 3, 3, (2, 5, 2)),
        ([3, 1, 1, 1, 3], 3, 0, 0, (1, 3, 1)),
        ([1] * 6, 3, 0, 9, (3, 3, 0)),
        ([0.1] * 6, 3, 0, 0, (2, 2, 2)),
        ([], 3, 1, 1, (0, 0, 0)),
        ([5, 1], 1, 1, 1, (2,)),
    ],
)
def test_by_cost(costs: list[float], devices: int, first: float, last: float, split: tuple[int, ...]) -> None:
    assert split_by_cost(costs, devices, first, last) == split


def loads(costs: list[float], split: tuple[int, ...], first: float, last: float) -> list[float]:
    starts = [sum(split[:device]) for device in range(len(split))]
    result = [float(sum(costs[start : start + count])) for start, count in zip(starts, split, strict=True)]
    result[0] += first
    result[-1] += last
    return result


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 4), st.floats(0, 3)), max_size=7),
    st.integers(1, 4),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_no_split_is_shorter_and_of_the_shortest_none_is_more_even(
    costs: list[float], devices: int, first: float, last: float
) -> None:
    found = loads(costs, split_by_cost(costs, devices, first, last), first, last)
    cuts = combinations_with_replacement(range(len(costs) + 1), devices - 1)
    splits = [tuple(b - a for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)) for cut in cuts]
    every = [loads(costs, split, first, last) for split in splits]
    shortest = min(map(max, every))
    assert max(found) == pytest.approx(shortest)
    evenness = [sum(load * load for load in one) for one in every if max(one) <= shortest * (1 + 1e-13)]
    assert sum(load * load for load in found) <= min(evenness) * (1 + 1e-9) + 1e-12


def test_a_large_model_takes_no_time() -> None:
    split = split_by_cost([1.0] * 1000, 256, 3.0, 5.0)
    assert sum(split) == 1000
    assert max(loads([1.0] * 1000, split, 3.0, 5.0)) == 5.0


@pytest.mark.parametrize(
    ("costs", "devices", "extra", "message"),
    [
        ([1, -1], 2, 0, "layer_costs must be finite and at least 0, not -1"),
        ([1, float("nan")], 2, 0, "layer_costs must be finite and at least 0, not nan"),
        ([1], 2, float("inf"), "first_extra must be finite and at least 0, not inf"),
        ([1], 0, 0, "devices must be at least 1, not 0"),
    ],
)
def test_impossible_costs(costs: list[float], devices: int, extra: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_by_cost(costs, devices, extra)
