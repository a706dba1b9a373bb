"""Vocabulary passes in every registered schedule, whatever its numbers and times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import by_virtual_times, random_costs

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    SCHEDULES,
    Kind,
    Placement,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
    time_order,
    without_offload,
)
from evenpipe.schedule.transforms.vocabulary import peak_limits


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@settings(max_examples=12, deadline=None)
@given(
    devices=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    barriers=st.sampled_from([1, 2]),
    planned=st.booleans(),
)
@pytest.mark.sampled(6)
def test_every_schedule(name: str, *, devices: int, microbatches: int, seed: int, barriers: int, planned: bool) -> None:
    """Sound, within the peak, no longer than sorted rows that keep to it; and so evaluates, and is interlaced."""
    try:
        stages = generate(name, devices, microbatches).placement.stages
        costs = random_costs(seed, Placement(devices, tuple(i % devices for i in range(stages))))
        order = without_offload(generate(name, devices, microbatches, costs=costs if planned else None))
    except InputError as refusal:
        assert "must" in str(refusal) or "need" in str(refusal), refusal
        return
    lowered = add_vocabulary(order, barriers, costs)
    limits = peak_limits(order, barriers)
    by_time = by_virtual_times(order, barriers, costs)
    if all(held <= limit for held, limit in zip(check_order(by_time).in_flight, limits, strict=True)):
        assert time_order(lowered, costs).span <= time_order(by_time, costs).span * (1 + 1e-6)
    report = check_order(lowered)
    assert all(held <= limit for held, limit in zip(report.in_flight, limits, strict=True))
    together = interlace(order, costs)
    for result in (lowered, forward_only(lowered, costs), together):
        report = check_program(add_communication(result, costs))
        assert report.ok, report.faults[0]
    for device in range(devices):
        row = list(together.passes(device))
        starts = [position for position, item in enumerate(row) if item.kind is Kind.S]
        assert [row[position + 1].kind for position in starts] == [Kind.T] * microbatches


@pytest.mark.parametrize("barriers", [0, 1])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_evaluation_without_waiting(name: str, barriers: int) -> None:
    """A further microbatch takes what every device needs for it: F of its stages, and S."""
    spans = []
    for microbatches in (16, 32):
        order = generate(name, 4, microbatches)
        evaluation = forward_only(add_vocabulary(order, 1) if barriers else order)
        assert check_order(evaluation).ok
        spans.append(time_order(evaluation, EQUAL_COSTS).span)
    assert spans[1] - spans[0] == pytest.approx(16 * (order.placement.stages // 4 + 0.4 * barriers))
