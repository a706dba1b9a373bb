"""V-schedules for any memory: as short as a V-schedule can be at every limit, and never longer with more memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Costs, check_order, generate, time_order
from evenpipe.schedule.generators import v_budget, v_half, v_min, zbv


def least(devices):
    return 2 * ((devices + 4) // 3)


def bubble_with(devices, limit):
    """The lower bound for V-schedules; one activation less than ZB-V has leaves one pass more."""
    return max(0, 6 * devices - 3 * limit - 1) + (devices > 1 and limit == 2 * devices - 1)


@pytest.mark.parametrize(
    ("devices", "bubbles"),
    [(4, {4: 11, 5: 8, 6: 5, 7: 3, 8: 0}), (8, {8: 23, 9: 20, 10: 17, 11: 14, 12: 11, 13: 8, 14: 5, 15: 3, 16: 0})],
)
def test_table(devices, bubbles):
    for limit, bubble in bubbles.items():
        timeline = time_order(v_budget(devices, 4 * devices, memory_limit=limit), EQUAL_COSTS)
        assert timeline.bubble == bubble
        assert max(timeline.peak_in_flight) <= limit


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7, 9, 10, 13, 16])
def test_every_limit_meets_the_lower_bound(devices):
    for limit in range(least(devices), 2 * devices + 1):
        timeline = time_order(v_budget(devices, 2 * devices + 1, memory_limit=limit), EQUAL_COSTS)
        assert timeline.bubble == bubble_with(devices, limit)
        assert max(timeline.peak_in_flight) <= limit


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 7])
@pytest.mark.sampled(5)
def test_more_memory_never_hurts_and_named_schedules_are_no_better(devices, microbatches):
    limits = range(least(devices), 2 * devices + 1)
    bubbles = [time_order(v_budget(devices, microbatches, memory_limit=k), EQUAL_COSTS).bubble for k in limits]
    assert bubbles == sorted(bubbles, reverse=True)
    for named in (v_min, v_half, zbv):
        timeline = time_order(named(devices, microbatches), EQUAL_COSTS)
        assert bubbles[max(0, max(timeline.peak_in_flight) - limits[0])] <= timeline.bubble


@settings(max_examples=40)
@given(
    devices=st.integers(1, 6),
    microbatches=st.integers(1, 14),
    extra=st.integers(0, 8),
    planned=st.booleans(),
    numbers=st.randoms(use_true_random=False),
)
def test_any_size_limit_and_costs_are_sound_and_within_the_limit(devices, microbatches, extra, planned, numbers):
    times = {kind: [numbers.uniform(0.1, 2) for _ in range(2 * devices)] for kind in "FIW"}
    costs = Costs(**times, p2p=numbers.choice([0, 0.2])) if planned else None
    limits = [least(devices) + numbers.randint(0, extra) for _ in range(devices)]
    report = check_order(v_budget(devices, microbatches, memory_limit=limits, costs=costs))
    assert report.ok, str(report)
    assert all(held <= limit for held, limit in zip(report.in_flight, limits, strict=True))


@pytest.mark.parametrize(
    ("devices", "limit", "times", "fixed", "bubble"),
    [
        (8, 10, (3, 4, 2), v_half, 80),
        (8, 10, (10.4, 10.2, 7.7), v_half, 199.1),
        (8, 10, (2, 1, 0.5), v_half, None),
        (8, 8, (3, 4, 2), v_min, None),
        (6, 6, (10.4, 10.2, 7.7), v_min, None),
    ],
)
def test_costs_shorten_what_the_fixed_blocks_leave(devices, limit, times, fixed, bubble):
    forward, inputs, weights = times
    costs = Costs(F=forward, I=inputs, W=weights)
    planned = time_order(v_budget(devices, 3 * devices, memory_limit=limit, costs=costs), costs)
    published = time_order(fixed(devices, 3 * devices), costs)
    assert planned.span < published.span
    if bubble is not None:
        assert planned.bubble == pytest.approx(bubble)


def test_without_a_limit_it_takes_what_zbv_takes():
    timeline = time_order(generate("v-budget", 4, 12), EQUAL_COSTS)
    assert (timeline.bubble, max(timeline.peak_in_flight)) == (0, 8)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (7, "memory_limit is 7, but a V-schedule on 8 devices needs 8 stage activations on each"),
        ([8] * 7 + [3], "needs 8 stage activations on each"),
        ([10, 10], "memory_limit has 2 numbers for 8 devices"),
        (-1, "memory_limit must be a finite number above 0"),
    ],
)
def test_limits_that_cannot_be_met(limit, message):
    with pytest.raises(InputError, match=message):
        v_budget(8, 16, memory_limit=limit)


def test_costs_must_split_the_backward():
    with pytest.raises(InputError, match="costs: I is missing; a V-schedule needs F, I and W"):
        v_budget(2, 4, costs=Costs(F=1, B=2))
