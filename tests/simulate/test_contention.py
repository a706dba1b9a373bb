"""Devices that compute at once slow each other down: by hand, and by what must hold whatever the order."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import SCHEDULES, Costs, Order, plan_order
from evenpipe.simulate import simulate


def times(csv: str, **costs: object) -> list[list[tuple[str, float, float]]]:
    timeline = simulate(Order.from_csv(csv), Costs(**costs)).timeline  # type: ignore[arg-type]
    return [[(str(e.item), e.start, e.end) for e in row] for row in timeline.events]


def test_two_devices_by_hand() -> None:
    """1F0 and 0F1 start at 1 and both take twice as long; alone, nothing changes."""
    assert times("0F0,0F1\n1F0,1F1\n", F=1, B=1, contention=2) == [
        [("0F0", 0, 1), ("0F1", 1, 3)],
        [("1F0", 1, 3), ("1F1", 3, 4)],
    ]


def test_a_pass_speeds_up_when_the_other_device_is_done() -> None:
    """1F0 (3) runs beside 0F1 (1): 1 of it takes 2, until 3; the other 2 take 2."""
    assert times("0F0,0F1\n1F0,1F1\n", F=(1, 3), B=1, contention=2)[1] == [("1F0", 1, 5), ("1F1", 5, 8)]


def test_some_of_the_others_count_in_proportion() -> None:
    """Three devices: one other of two that computes costs half of what both cost."""
    found = times("0F0,0F1,0F2\n1F0,1F1,1F2\n2F0,2F1,2F2\n", F=1, B=1, contention=3)
    assert found[0][1] == ("0F1", 1, 3)  # beside 1F0: factor 2
    assert found[0][2] == ("0F2", 3, 6)  # beside 1F1 and 2F0: factor 3


def test_beside_a_collective_both_factors_count() -> None:
    order = plan_order("1f1b", 2, 2, "vocab-2")
    base = {"F": 1, "B": 2, "S": 0.5, "T": 0.5, "E": 0.1, "G": 0.1, "collectives": {"broadcast": 0.5}}
    alone, either, both = (
        simulate(order, Costs(**base, **more)).makespan  # type: ignore[arg-type]
        for more in ({}, {"contention": 1.5}, {"contention": 1.5, "overlap_slowdown": 1.5})
    )
    assert alone < either < both


@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_work_and_longest_times_hold_for_every_schedule(schedule: str, mode: str) -> None:
    """Each pass takes at least its time and at most the factor of it; 1 changes nothing at all."""
    costs = {"F": 1.0, "I": 1.0, "W": 0.75, "B": 2.0, "S": 0.5, "C": 0.1, "T": 0.5, "E": 0.1, "G": 0.1}
    order = plan_order(schedule, 3, 6, mode, Costs(**costs))  # type: ignore[arg-type]
    plain, loaded = (simulate(order, Costs(**costs, contention=factor)) for factor in (1.0, 1.3))  # type: ignore[arg-type]
    assert plain.timeline == simulate(order, Costs(**costs)).timeline  # type: ignore[arg-type]
    for row, before, slowed in zip(loaded.timeline.events, plain.timeline.events, loaded.slowed, strict=True):
        extra = 0.0
        for event, other in zip(row, before, strict=True):
            takes = other.end - other.start
            assert takes - 1e-9 <= event.end - event.start <= 1.3 * takes + 1e-9
            extra += event.end - event.start - takes
        assert slowed == pytest.approx(extra)
    assert plain.makespan <= loaded.makespan <= 1.3 * plain.makespan + 1e-9


def test_below_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"contention must be at least 1, not 0\.5"):
        Costs(F=1, B=2, contention=0.5)
