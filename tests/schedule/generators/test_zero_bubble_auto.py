"""zb-auto: the figures of arXiv 2401.10241, memory limits, and stages that differ."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Costs, Order, check_order, generate, time_order
from evenpipe.schedule.generators import zb_auto
from evenpipe.schedule.passes import Kind

# devices, microbatches, F, I, W, hop (appendix D); bubble rates of ZB-1p and ZB-2p (Table 5)
TABLE_5 = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.1106, 0.0029),
]


@pytest.mark.parametrize("row", TABLE_5, ids=str)
def test_bubble_rates_of_the_paper(row: tuple[Any, ...]) -> None:
    d, m, f, i, w, hop, one, two = row
    costs = Costs(F=f, I=i, W=w, p2p=hop)
    for limit, rate in ((None, one), (d, one), (2 * d, two)):
        order = generate("zb-auto", d, m, costs=costs, memory_limit=limit)
        assert check_order(order).faults == ()
        cost = time_order(order, costs).span
        assert round((cost - m * (f + i + w)) / cost, 4) == rate


@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8])
@pytest.mark.sampled(6)
def test_equal_times_and_any_number_of_microbatches(d: int, share: float) -> None:
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 21):
        for limit, ahead in ((d, d), (2 * d - 1, 2 * d - 1), (2 * d, 2 * d - 1), (1e9, 2 * d - 1)):
            order = zb_auto(d, m, memory_limit=limit, weight_share=share)
            assert check_order(order).faults == ()
            assert time_order(order, EQUAL_COSTS).bubble == 2 * (d - 1) - (min(m, ahead) - 1)
            assert peak_stored(order, share) <= limit


def test_between_one_and_two() -> None:
    bubbles = [time_order(generate("zb-auto", 8, 32, memory_limit=k), EQUAL_COSTS).bubble for k in range(8, 17)]
    assert bubbles == [7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_a_limit_below_the_number_of_devices() -> None:
    for limit, bubble in ((7, 11), (6, 13), (4, 55), (1, 14 * 32)):
        order = generate("zb-auto", 8, 32, memory_limit=limit)
        assert peak_stored(order, 0.5) <= limit
        assert time_order(order, EQUAL_COSTS).bubble <= bubble


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from([0, 0.3, 0.5, 1]), st.randoms(use_true_random=False))
def test_random_times_and_limits(d: int, m: int, share: float, rng: random.Random) -> None:
    spread = rng.choice([0.1, 0.5, 1.0])
    f, i, w = ([rng.uniform(1 - spread, 1 + spread) for _ in range(d)] for _ in range(3))
    costs = Costs(F=f, I=i, W=w, p2p=rng.choice([0, 0.1, 2]))
    limits = [rng.uniform(1, 2 * d) for _ in range(d)]
    order = generate("zb-auto", d, m, costs=costs, memory_limit=limits, weight_share=share)
    assert check_order(order).faults == ()
    assert all(peak <= limit + 1e-6 for peak, limit in zip(stored(order, share), limits, strict=True))
    span = time_order(order, costs).span
    for name in ("zb-h1", "zb-h2"):
        other = generate(name, d, m)
        if all(peak <= limit for peak, limit in zip(stored(other, share), limits, strict=True)):
            assert span <= time_order(other, costs).span * (1 + 1e-6)


def test_it_plans_by_the_times_of_every_stage() -> None:
    rng = random.Random(0)
    gains = []
    for _ in range(10):
        f, i, w = ([rng.uniform(0.7, 1.3) for _ in range(8)] for _ in range(3))
        costs = Costs(F=f, I=i, W=w)
        planned = time_order(generate("zb-auto", 8, 32, costs=costs), costs).bubble_rate
        gains.append(time_order(generate("zb-h1", 8, 32), costs).bubble_rate - planned)
    assert min(gains) >= 0 and sum(gains) / len(gains) > 0.01


def test_what_is_in_flight_is_limited_where_i_leaves_everything_until_w() -> None:
    order = generate("zb-auto", 6, 20, memory_limit=[6, 6, 5, 4, 3, 2], weight_share=1)
    assert all(peak <= limit for peak, limit in zip(check_order(order).in_flight, (6, 6, 5, 4, 3, 2), strict=True))


def test_times_without_length() -> None:
    for costs in (Costs(F=0, I=0, W=0), Costs(F=[0, 1, 0], I=1, W=0), Costs(F=1, I=[0, 0, 2], W=[0, 3, 0])):
        assert check_order(generate("zb-auto", 3, 5, costs=costs)).faults == ()


def test_a_hop_is_as_long_by_link_as_by_time() -> None:
    times, links = Costs(F=1, I=1, W=1, p2p=0.5), Costs(F=1, I=1, W=1, links={"p2p": {"latency": 0.5}})
    assert generate("zb-auto", 4, 12, costs=times) == generate("zb-auto", 4, 12, costs=links)
    assert generate("zb-auto", 4, 12, costs=times) != generate("zb-auto", 4, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0.5}, "memory_limit must be a finite number of at least 1, in stage activations, not 0.5"),
        ({"memory_limit": [4, 4, 0.9, 4]}, "must be a finite number of at least 1, in stage activations, not 0.9"),
        ({"memory_limit": [4, 4]}, "memory_limit has 2 numbers for 4 devices"),
        ({"memory_limit": float("inf")}, "memory_limit must be a finite number"),
        ({"weight_share": "1"}, "weight_share must be a number from 0 to 1, not '1'"),
        ({"weight_share": 1.5}, "weight_share must be a number from 0 to 1, not 1.5"),
        ({"costs": Costs(F=1, B=2)}, "costs: I is missing; a split backward needs F, I and W"),
        ({"costs": Costs(F=[1, 2], I=1, W=1)}, "costs: F has 2 numbers for 4 stages"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        generate("zb-auto", 4, 8, **options)


def stored(order: Order, share: float) -> list[float]:
    """Per device, the most activations stored, of which I leaves `share` until W."""
    peaks = []
    for device in range(order.devices):
        held = peak = 0.0
        for item in order.passes(device):
            held += {Kind.F: 1, Kind.I: share - 1, Kind.W: -share}[item.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def peak_stored(order: Order, share: float) -> float:
    return max(stored(order, share))
