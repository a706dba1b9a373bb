"""Orders for evaluation."""

from __future__ import annotations

import pytest
from schedule_oracle import words

from evenpipe.schedule import MODES, Costs, Order, check_order, forward_only, generate, plan_order, time_order


def test_without_vocabulary_passes_only_forwards_stay() -> None:
    order = forward_only(generate("1f1b", 3, 4))
    assert [words(order, device) for device in range(3)] == [f"{s}F0 {s}F1 {s}F2 {s}F3" for s in range(3)]
    assert (order.barriers, order.forward_only) == (0, True)


@pytest.mark.parametrize("mode", ["vocab-1", "vocab-2", "interlaced"])
def test_every_vocabulary_mode_evaluates_alike(mode: str) -> None:
    order = forward_only(plan_order("1f1b", 2, 4, mode))
    assert (order.barriers, order.forward_only) == (1, True)
    assert words(order, 0) == "E0 E1 0F0 E2 0F1 E3 0F2 S0 0F3 S1 C0 S2 C1 S3 C2 C3"
    assert words(order, 1) == "E0 E1 E2 1F0 E3 1F1 S0 1F2 S1 C0 1F3 S2 C1 S3 C2 C3"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 5), (3, 1), (3, 2), (4, 9)])
def test_every_mode_is_sound(mode: str, devices: int, microbatches: int) -> None:
    order = forward_only(plan_order("1f1b", devices, microbatches, mode))
    assert check_order(order).ok
    assert forward_only(order) is order


@pytest.mark.parametrize("mode", ["vocab-1", "vocab-2", "interlaced"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("output", [0.2, 1.0, 3.0])
def test_no_device_waits_in_steady_state(mode: str, name: str, output: float) -> None:
    """A further microbatch takes F + S + C + E, though X and the statistics are under way for a while."""
    slow = {"broadcast": 0.1, "statistics": 0.9}
    costs = Costs(F=1, B=2, S=output, C=0.1, T=1, E=0.1, G=0, collectives=slow)
    spans = [time_order(forward_only(plan_order(name, 4, m, mode)), costs).span for m in (40, 80)]
    assert (spans[1] - spans[0]) / 40 == pytest.approx(1.2 + output)


def test_passes_run_as_one_are_taken_apart() -> None:
    order = forward_only(Order.from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1"))
    assert words(order, 0) == "0F0 1F0 0F1 1F1"


def test_forwards_may_be_much_shorter_than_backwards() -> None:
    """Coarse times, which are tried as well, have none for them."""
    costs = Costs(F=0.01, B=6, I=3, W=3, S=1, C=0.1, T=1, E=0.1, G=0.1)
    order = forward_only(plan_order("zb-h1", 2, 4, "vocab-2", costs), costs)
    assert check_order(order).ok and order.barriers == 1
