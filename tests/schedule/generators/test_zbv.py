"""ZB-V: zero bubble at the memory of 1F1B, and never worse than torch's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.schedule import EQUAL_COSTS, Costs, Order, Pass, Placement, check_order, time_order
from evenpipe.schedule.generators import zbv


def sizes():
    return [(d, m) for d in (1, 2, 3, 4, 5, 8, 12, 16) for m in (2 * d - 1, 2 * d, 3 * d + 1)]


@pytest.mark.parametrize(("devices", "microbatches"), sizes())
def test_no_bubble_and_the_same_memory_everywhere(devices, microbatches):
    timeline = time_order(zbv(devices, microbatches), EQUAL_COSTS)
    assert timeline.bubble == 0
    assert timeline.peak_in_flight == (2 * devices,) * devices


@pytest.mark.parametrize(("devices", "times", "bubble"), [(4, (3, 4, 2), 12), (8, (3, 4, 2), 28)])
def test_the_order_by_hand_with_unequal_passes(devices, times, bubble):
    forward, inputs, weights = times
    for microbatches in (2 * devices, 4 * devices):
        timeline = time_order(zbv(devices, microbatches), Costs(F=forward, I=inputs, W=weights))
        assert timeline.bubble == bubble


@pytest.mark.parametrize("microbatches_per_device", [2, 4])
@pytest.mark.parametrize(
    ("devices", "times", "bubble"),
    [
        (4, (3, 4, 2), 10),
        (8, (3, 4, 2), 26),
        (4, (10.4, 10.2, 7.7), 11.0),
        (8, (10.4, 10.2, 7.7), 30.3),  # the authors' heuristic: 35
    ],
)
def test_planned_by_costs(devices, times, bubble, microbatches_per_device):
    forward, inputs, weights = times
    costs = Costs(F=forward, I=inputs, W=weights)
    order = zbv(devices, microbatches_per_device * devices, costs=costs)
    timeline = time_order(order, costs)
    assert timeline.bubble <= bubble + 1e-6
    assert max(timeline.peak_in_flight) <= 2 * devices


@settings(max_examples=25)
@given(devices=st.integers(1, 4), microbatches=st.integers(1, 12), numbers=st.randoms(use_true_random=False))
def test_costs_per_stage_never_make_it_longer_than_by_hand(devices, microbatches, numbers):
    times = {kind: [numbers.uniform(0.2, 2) for _ in range(2 * devices)] for kind in "FIW"}
    costs = Costs(**times, p2p=numbers.choice([0, 0.3]))
    planned = zbv(devices, microbatches, costs=costs)
    report = check_order(planned)
    assert report.ok, str(report)
    assert max(report.in_flight) <= 2 * devices
    assert time_order(planned, costs).span <= time_order(zbv(devices, microbatches), costs).span * (1 + 1e-9)


def test_as_many_microbatches_as_devices():
    assert time_order(zbv(4, 4), EQUAL_COSTS).bubble == 6


def torch_order(devices: int, microbatches: int) -> Order:
    """What torch's ScheduleZBVZeroBubble would run.

    It comes from the private method that the constructor calls for every rank, so that no process group is needed; a
    torch that has renamed it skips the comparison.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = SimpleNamespace(pp_group_size=devices, num_stages=2 * devices, _n_microbatches=microbatches)
    try:
        plan = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations
        rows = [[str(action) for action in plan(numbers, rank) if action is not None] for rank in range(devices)]
    except AttributeError as error:
        pytest.skip(f"this torch plans its ZBV schedule elsewhere: {error}")
    return Order(Placement.v_shape(devices), microbatches, tuple(tuple(map(Pass.parse, row)) for row in rows))


@pytest.mark.parametrize("microbatches", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_not_longer_than_torchs_order(devices, microbatches):
    theirs = time_order(torch_order(devices, microbatches), EQUAL_COSTS)
    ours = time_order(zbv(devices, microbatches), EQUAL_COSTS)
    assert ours.span <= theirs.span
    assert ours.makespan <= theirs.makespan
    assert all(a <= b for a, b in zip(ours.peak_in_flight, theirs.peak_in_flight, strict=True))
