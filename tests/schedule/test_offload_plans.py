"""Plans for activations on the host: by hand where they are small, at random where they are not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from offload_builds import check_build

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Order, Pass, add_communication, generate, offloaded, plan_offload, plan_order

GPIPE = "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0"


def words(order: Order) -> str:
    return ",".join(map(str, order.rows[0]))


# --- by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copy", "given", "wanted"),
    [
        # A copy takes as long as a forward: D stands where it is over, L behind the last pass that ends before the copy
        # has to begin. 0F2 would be back as soon as it had gone.
        (1.0, {}, "0F0,0O0,0F1,0D0,0O1,0F2,0D1,0F3,0B3,0L1,0B2,0L0,0B1,0B0"),
        (0.0, {"limit": 2}, "0F0,0O0,0D0,0F1,0O1,0D1,0F2,0F3,0B3,0B2,0L1,0B1,0L0,0B0"),
        (9.0, {}, GPIPE),  # nothing could be back in time
        (9.0, {"limit": 3}, "0F0,0O0,0F1,0F2,0D0,0F3,0B3,0L0,0B2,0B1,0B0"),  # but it has to
        (1.0, {"limit": 4}, GPIPE),  # enough as it is
        (1.0, {"only": [(0, 2)]}, GPIPE),  # which does not lower the most that is held
    ],
)
def test_one_device(copy: float, given: dict[str, object], wanted: str) -> None:
    costs = Costs(F=1, B=2, O=copy, L=copy, bytes=1)
    assert words(plan_offload(Order.from_csv(GPIPE), costs, **given).order) == wanted  # type: ignore[arg-type]


def test_what_is_too_much_is_said_and_a_host_without_room_gets_nothing() -> None:
    plan = plan_offload(generate("1f1b", 2, 4), Costs(F=1, B=2, O=1, L=1, bytes=[4, 6]), limit=5)
    assert (plan.over, plan.peak_bytes) == ((0.0, 1.0), (4.0, 6.0)) and sum(plan.moved) > 0
    for room, moves in ((3, False), (9, True)):
        plan = plan_offload(generate("gpipe", 2, 6), Costs(F=1, B=2, O=1, L=1, bytes=4), host_limit=room)
        assert (sum(plan.moved) > 0) == moves


def test_an_order_of_a_run_keeps_to_the_memory_of_the_host() -> None:
    costs = Costs(F=1, I=1, W=1, O=1, L=1, bytes=4)
    for schedule, offload in (("gpipe", "all"), ("gpipe", "free"), ("gpipe", 8), ("po-h", "scheduled")):
        order = partial(plan_order, schedule, 2, 6, "first-last", costs, offload=offload)
        free, limited, none = (len(offloaded(order(host_memory=room))) for room in (None, 9, 3))
        assert free >= limited > none == 0 and (free > limited or schedule == "po-h"), (schedule, offload)
        unknown = replace(costs, bytes=None)  # then the host itself says when it is full
        if offload != 8:
            assert plan_order(schedule, 2, 6, "first-last", unknown, offload=offload, host_memory=3)


def test_wrong_limits_and_words() -> None:
    stored = Costs(F=1, B=2, bytes=1)
    for costs, limit, message in (
        (Costs(F=1, B=2), 3, "a limit needs costs with bytes, the bytes that passes store"),
        (stored, 0, "is 0; it must be a finite number above 0, in bytes"),
        (stored, [1, 2, 3], "has 3 numbers for 2 devices; give one number, or 2"),
    ):
        with pytest.raises(InputError, match=message):
            plan_offload(generate("1f1b", 2, 4), costs, limit=limit)
    for offload in ("some", 0, True, float("nan")):
        with pytest.raises(
            InputError, match=r"offload is .*; it must be one of scheduled, none, free, all, or bytes above"
        ):
            plan_order("1f1b", 2, 4, "first-last", offload=offload)  # type: ignore[arg-type]


def test_memory_is_given_back_behind_the_transfers_before_the_next_pass() -> None:
    """Else whoever waits for them would wait for the copy, too."""
    costs = Costs(F=1, B=2, S=0.4, T=0.4, E=0, G=0, O=2, L=2, p2p=0.1)
    order = plan_order("1f1b", 4, 8, "vocab-1", costs, offload="free")
    found = 0
    for row in add_communication(order, costs).rows:
        for place, item in enumerate(row):
            if item.kind is Kind.D:
                found += 1
                assert isinstance(row[place + 1], Pass), list(map(str, row[place - 2 : place + 3]))
    assert found > 10


# --- at random --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_any_order_budget_and_links(block: int) -> None:
    """`python tests/schedule/offload_builds.py 2000` does as many more."""
    came = [check_build(seed) for seed in range(25 * block, 25 * block + 25)]
    assert "moved" in came
    assert "forced" in came
