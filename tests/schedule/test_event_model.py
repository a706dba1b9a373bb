"""When passes run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_times, random_costs, random_order

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    DeadlockError,
    Order,
    Pass,
    Placement,
    add_vocabulary,
    generate,
    time_order,
)
from evenpipe.schedule.costs import PassTimes


def starts(text: str, costs: Costs) -> list[dict[str, float]]:
    order = Order.from_csv(text)
    return [{str(event.item): event.start for event in row} for row in time_order(order, costs).events]


def test_an_example_by_hand() -> None:
    costs = Costs(F=1, B=2, p2p=0.5)
    assert starts("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", costs) == [
        {"0F0": 0, "0F1": 1, "0B0": 5, "0B1": 8},
        {"1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "1B1": 5.5},
    ]


def test_an_example_with_collectives() -> None:
    costs = Costs(
        F=[1, 1], B=[2, 2], S=[1, 2], C=0.5, T=1, E=[0.25, 0.5], G=1,
        collectives={"broadcast": 0.1, "statistics": 0.2, "reduce": 0.4, "embedding": 0.3},
    )  # fmt: skip
    # ROWS are ready at 0.5 and there at 0.8, X at 2.8 and 2.9, statistics, when S of device 1 is done, at 4.8 and 5.0.
    found = starts("E0,0F0,S0,C0,T0,0B0,G0\nE0,1F0,S0,C0,1B0,T0,G0", costs)
    expected = [
        {"E0": 0, "0F0": 0.8, "S0": 2.9, "C0": 5.0, "T0": 5.5, "0B0": 7.9, "G0": 9.9},
        {"E0": 0, "1F0": 1.8, "S0": 2.8, "C0": 5.0, "1B0": 5.9, "T0": 7.9, "G0": 10.2},
    ]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted)


def test_times_per_stage_and_device() -> None:
    costs = Costs(F=[1, 10], I=[2, 20], W=[3, 30], S=[1, 2])
    times = PassTimes(costs, Placement.linear(2))
    words = ["0F0", "1F0", "0B0", "1B0", "1I0", "1W0", "1R0", "1O0", "1D0", "1L0", "0UNSHARD", "(1F1;0B0)OVERLAP_F_B"]
    assert [times.of(Pass.parse(word), 0) for word in words] == [1, 10, 5, 50, 20, 30, 10, 0, 0, 0, 0, 15]
    assert [times.of(Pass.parse("S0"), device) for device in range(2)] == [1, 2]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 9])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1), (0.3, 0.7)])
def test_bubbles_of_the_closed_forms(
    name: str, devices: int, microbatches: int, forward: float, backward: float
) -> None:
    timeline = time_order(generate(name, devices, microbatches), Costs(F=forward, B=backward))
    assert timeline.makespan == pytest.approx((microbatches + devices - 1) * (forward + backward))
    assert timeline.bubble == pytest.approx((devices - 1) * (forward + backward))
    work = microbatches * (forward + backward)
    assert timeline.busy == pytest.approx((work,) * devices)
    assert timeline.bubble_rate == pytest.approx(timeline.bubble / (timeline.bubble + work))


PLACEMENTS = [Placement.linear(1), Placement.linear(3), Placement.looped(2, 3), Placement.v_shape(3)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACEMENTS), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([0, 1, 2]), st.booleans())
def test_agrees_with_the_second_opinion(
    placement: Placement, microbatches: int, seed: int, barriers: int, split: bool
) -> None:
    order = random_order(seed, placement, microbatches, split=split)
    costs = random_costs(seed, placement)
    costs = Costs(**{name: getattr(costs, name) for name in "FBIWSCTEG"})  # The second opinion knows no transfer times.
    if barriers:
        order = add_vocabulary(order, barriers, costs)
    times = PassTimes(costs, placement)
    expected = end_times(order, times.of)
    found = {(event.device, event.item): event.end for row in time_order(order, costs).events for event in row}
    assert found == pytest.approx(expected)


def test_deadlock_shows_where_every_device_stands() -> None:
    order = Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(DeadlockError) as error:
        time_order(order, EQUAL_COSTS)
    assert str(error.value) == (
        "the order cannot complete: "
        "device 0 stops at position 1, 0B0, awaiting 1B0 of device 1; "
        "device 1 stops at position 1, 1F1, awaiting 0F1 of device 0\n"
        "  device 0: 0F0 [0B0] 0F1 0B1\n"
        "  device 1: 1F0 [1F1] 1B0 1B1"
    )
    assert error.value.positions == {0: 1, 1: 1}


def test_deadlock_names_what_is_nowhere_and_counts_idle_slots() -> None:
    order = Order.from_csv("0F0,,0B0\n1F0,1F1,1B1", microbatches=2)
    with pytest.raises(DeadlockError) as error:
        time_order(order, EQUAL_COSTS)
    assert "device 0 stops at position 2, 0B0, awaiting 1B0 of device 1 (which is in no row)" in str(error.value)
    assert "device 1 stops at position 1, 1F1, awaiting 0F1 of device 0 (which is in no row)" in str(error.value)
    assert "device 0: 0F0 . [0B0]" in str(error.value)


def test_deadlock_of_many_devices_is_still_readable() -> None:
    order = add_vocabulary(generate("1f1b", 20, 2), 1)
    rows = (tuple(item for item in order.rows[0] if str(item) != "S1"), *order.rows[1:])
    with pytest.raises(DeadlockError, match="and 12 more devices") as error:
        time_order(Order(order.placement, 2, rows, 1), EQUAL_COSTS)
    assert "S1 of device 0 (which is in no row)" in str(error.value)


def test_a_stage_that_does_not_exist() -> None:
    order = Order.from_csv("0F0,0B0,5F0", placement=Placement.linear(1))
    with pytest.raises(InputError, match="5F0 names a stage that does not exist; stages are 0 to 0"):
        time_order(order, EQUAL_COSTS)
