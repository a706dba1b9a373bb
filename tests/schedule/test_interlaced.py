"""Synchronous vocabulary passes."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import random_costs, random_order, words

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Kind,
    Order,
    Placement,
    add_communication,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
    time_order,
)


def test_the_layout_alternates_along_the_pipeline() -> None:
    order = interlace(generate("1f1b", 3, 4))
    assert words(order, 2) == "E0 E1 2F0 E2 S0 T0 2B0 2F1 E3 S1 T1 2B1 2F2 S2 T2 2B2 2F3 S3 T3 2B3 G0 G1 G2 G3"
    assert words(order, 1) == "E0 E1 1F0 E2 S0 T0 1F1 E3 S1 T1 1F2 1B0 S2 T2 1F3 1B1 S3 T3 1B2 G0 1B3 G1 G2 G3"
    assert words(order, 0) == "E0 0F0 E1 0F1 E2 S0 T0 0F2 E3 S1 T1 0F3 S2 T2 0B0 S3 T3 0B1 G0 0B2 G1 0B3 G2 G3"


@pytest.mark.parametrize("devices", range(1, 13))
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_in_flight_is_half_as_much_again(devices: int, name: str) -> None:
    """A device with d devices behind it holds d + ceil(d / 2) + 1, so 1.5 p at most."""
    for microbatches in (1, 2, 3, 7, 16, 30):
        report = check_order(interlace(generate(name, devices, microbatches)))
        assert report.ok
        behind = [devices - 1 - device for device in range(devices)]
        assert report.in_flight == tuple(min(microbatches, d + ceil(d / 2) + 1) for d in behind)
        assert max(report.in_flight) <= ceil(1.5 * devices)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 9, 32])
def test_no_device_waits_in_the_middle(devices: int, microbatches: int) -> None:
    """Bubble (p - 1)(F + B), as if the vocabulary passes were part of every device's own work."""
    timeline = time_order(interlace(generate("1f1b", devices, microbatches)), EQUAL_COSTS)
    assert timeline.span - max(timeline.busy) == pytest.approx(3 * (devices - 1))


@settings(max_examples=80, deadline=None)
@given(
    devices=st.integers(1, 6),
    per_device=st.integers(1, 3),
    v_shape=st.booleans(),
    microbatches=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    split=st.booleans(),
    equal=st.booleans(),
)
def test_any_order_and_costs(
    *, devices: int, per_device: int, v_shape: bool, microbatches: int, seed: int, split: bool, equal: bool
) -> None:
    placement = Placement.v_shape(devices) if v_shape else Placement.looped(devices, per_device)
    costs = EQUAL_COSTS if equal else random_costs(seed, placement)
    order = interlace(random_order(seed, placement, microbatches, split=split), costs)
    for result in (order, forward_only(order)):
        report = check_program(add_communication(result, costs))
        assert report.ok, report.faults[0]
    for device in range(devices):
        row = list(order.passes(device))
        at = [position for position, item in enumerate(row) if item.kind is Kind.S]
        assert [row[position + 1].kind for position in at] == [Kind.T] * microbatches
        assert all(row[position + 1].microbatch == row[position].microbatch for position in at)


def test_a_placement_in_any_direction() -> None:
    """Stage 0 on device 2: what alternates is the pipeline, not the numbers of devices."""
    costs = Costs(F=[1, 2, 1], B=[2, 1, 3], S=1, T=1, E=0, G=0)
    order = interlace(random_order(0, Placement(3, (2, 0, 1)), 6), costs)
    assert check_program(add_communication(order, costs)).ok
    assert words(order, 1).startswith("E0 E1 2F0 E2 S0 T0 2B0 2F1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E0,0F0,S0,T0,0B0,G0", "the order has vocabulary passes already, with 2 barriers"),
        ("0F0", "an order that only evaluates cannot be interlaced"),
        ("0F0,0B0,0REDUCE_GRAD", "cannot be added between UNSHARD"),
    ],
)
def test_what_cannot_be_lowered(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        interlace(Order.from_csv(text))


def test_costs_that_are_missing() -> None:
    with pytest.raises(InputError, match="B is missing"):
        interlace(generate("1f1b", 2, 2), Costs(F=1))
    with pytest.raises(InputError, match="F and B of at least one stage must be above 0"):
        interlace(random_order(0, Placement.looped(2, 2), 2), Costs(F=0, B=0))
