"""What a timeline reports, by hand."""

from __future__ import annotations

import pytest

from evenpipe.schedule import Costs, Event, Order, Pass, Placement, Timeline, generate, time_order


def example() -> Timeline:
    """Device 0 runs from 0 to 9 with 3 idle, device 1 from 1 to 11 with 2 idle."""
    table = [(0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0B0", 5, 9), (1, "1F0", 1, 2), (1, "1B0", 4, 11)]
    events = [Event(device, Pass.parse(word), start, end) for device, word, start, end in table]
    return Timeline((tuple(events[:3]), tuple(events[3:])), stage_bytes=(10.0, 7.0))


def test_definitions() -> None:
    timeline = example()
    assert timeline.spans == (9, 10)
    assert timeline.span == 10
    assert timeline.makespan == 11
    assert timeline.skew == 1
    assert timeline.busy == (6, 8)
    assert timeline.busy_by_kind == ({"F": 2, "B": 4}, {"F": 1, "B": 7})
    assert timeline.bubble == 2
    assert timeline.bubble_rate == 0.2
    assert timeline.peak_in_flight == (2, 1)
    assert timeline.peak_bytes == (20.0, 7.0)


def test_bytes_are_reported_when_they_are_known() -> None:
    order = generate("1f1b", 3, 4)
    assert time_order(order, Costs(F=1, B=2)).peak_bytes is None
    assert time_order(order, Costs(F=1, B=2, bytes=5)).peak_bytes == (15.0, 10.0, 5.0)
    assert time_order(order, Costs(F=1, B=2, bytes=[1, 10, 100])).peak_bytes == (3.0, 20.0, 100.0)


def test_a_split_backward_releases_with_its_weight_gradient() -> None:
    order = Order.from_csv("0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2")
    assert time_order(order, Costs(F=1, I=1, W=1)).peak_in_flight == (2,)


def test_stages_of_a_device_count_together() -> None:
    order = Order.from_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1")
    assert time_order(order, Costs(F=1, B=1, bytes=[1, 2])).peak_in_flight == (4,)
    assert time_order(order, Costs(F=1, B=1, bytes=[1, 2])).peak_bytes == (6.0,)


def test_nothing_that_takes_time() -> None:
    timeline = time_order(generate("1f1b", 2, 2), Costs(F=0, B=0))
    assert (timeline.span, timeline.makespan, timeline.bubble_rate) == (0, 0, 0)


@pytest.mark.parametrize("placement", [Placement.linear(2)])
def test_a_device_without_events(placement: Placement) -> None:
    timeline = Timeline((example().events[0], ()))
    assert timeline.spans == (9, 0)
    assert timeline.makespan == 9
    assert placement.devices == timeline.devices
