"""DualPipeV: its steps, bubble and peak."""

from __future__ import annotations

import pytest

from evenpipe.schedule import EQUAL_COSTS, Costs, Order, Placement, check_order, generate, time_order


def test_two_devices_as_published() -> None:
    order = generate("dualpipe-v", 2, 5)
    assert order == Order.from_csv(
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,(0F4;3B2)OVERLAP_F_B,"
        "(3F3;0B1)OVERLAP_F_B,3B3,(3F4;0B2)OVERLAP_F_B,3B4,0I3,0W3,0I4,0W4\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,"
        "(1F4;2B2)OVERLAP_F_B,(2F4;1B2)OVERLAP_F_B,2B3,1B3,2I4,1I4,2W4,1W4"
    )


def test_one_after_the_other_is_the_same_without_brackets() -> None:
    text = generate("dualpipe-v", 3, 8).to_csv()
    flat = text.replace("(", "").replace(")OVERLAP_F_B", "").replace(";", ",")
    assert generate("dualpipe-v", 3, 8, overlap=False).to_csv() == flat != text


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize("W", [0, 0.5, 1])
def test_bubble_and_peak(devices: int, more: int, W: float) -> None:
    costs = Costs(F=1, I=1, W=W)
    microbatches = 2 * devices + more
    together = time_order(generate("dualpipe-v", devices, microbatches), costs)
    apart = time_order(generate("dualpipe-v", devices, microbatches, overlap=False), costs)
    F, B = 1, 1 + W
    assert together.bubble == pytest.approx((devices - 1) * (F + 2 * B - 3 * W))
    assert apart.bubble == pytest.approx((devices - 1) * (F + B - 2 * W))
    assert together.peak_in_flight == apart.peak_in_flight == (2 * devices + 1,) * devices


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", range(1, 12))
@pytest.mark.parametrize("overlap", [True, False])
def test_sound_at_any_size(devices: int, microbatches: int, overlap: bool) -> None:
    order = generate("dualpipe-v", devices, microbatches, overlap=overlap)
    assert check_order(order).ok
    assert order.placement == Placement.v_shape(devices)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_few_microbatches_are_as_quick_as_can_be(devices: int) -> None:
    for microbatches in range(1, devices + 1):
        # The first microbatch goes out and back through all stages, the others follow right behind, then a last W.
        timeline = time_order(generate("dualpipe-v", devices, microbatches), EQUAL_COSTS)
        assert timeline.makespan == 4 * devices + 4 * (microbatches - 1) + 2
        assert max(timeline.peak_in_flight) == 2 * microbatches
