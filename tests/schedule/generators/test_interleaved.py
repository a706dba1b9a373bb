"""Interleaved 1F1B (arXiv 2104.04473): closed forms for any number of microbatches, and torch's orders beside ours."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Order, Pass, Placement, check_order, generate, time_order


def test_a_small_order() -> None:
    order = generate("interleaved", 2, 4, stages_per_device=2)
    assert [" ".join(map(str, order.passes(device))) for device in range(2)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_one_stage_per_device_is_1f1b() -> None:
    assert generate("interleaved", 4, 6, stages_per_device=1) == generate("1f1b", 4, 6)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8])
def test_bubble_and_peak_for_any_number_of_microbatches(d: int, v: int) -> None:
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 23):
        order = generate("interleaved", d, m, stages_per_device=v)
        group = -(-m // max(1, m // d))
        peaks = tuple(min(m * v, (v - 1) * group + 2 * (d - 1 - device) + 1) for device in range(d))
        report = check_order(order)
        assert report.faults == () and report.in_flight == peaks
        for f, b in ((1, 2), (3, 4), (2, 1)):
            timeline = time_order(order, Costs(F=f, B=b))
            assert timeline.bubble == (d - 1 + (v - 1) * max(0, d - m)) * (f + b)
            assert timeline.skew == 0


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8])
def test_group_size(d: int, v: int) -> None:
    for m in (1, 3, 4, 5, 9, 13, 15, 23):
        for size in (d, d + 1, d + 3):
            order = generate("interleaved", d, m, stages_per_device=v, group_size=size)
            report = check_order(order)
            assert report.faults == ()
            for device, peak in enumerate(report.in_flight):
                assert peak <= min(m * v, (v - 1) * size + 2 * (d - 1 - device) + 1)
            # Gaps of groups with fewer microbatches than devices are a constant, however many groups there are.
            few = (v - 1) * max(0, d - m)
            bubble = time_order(order, Costs(F=1, B=2)).bubble
            assert 3 * (d - 1 + few) <= bubble <= 3 * (d - 1 + few + (v - 1) * (d - 1))


def test_small_groups_save_memory_and_cost_bubble() -> None:
    costs = Costs(F=1, B=2)
    found = {}
    for size in (None, 8, 15):
        timeline = time_order(generate("interleaved", 8, 15, stages_per_device=2, group_size=size), costs)
        found[size] = (timeline.bubble, max(timeline.peak_in_flight))
    assert found == {None: (21, 30), 8: (22, 22), 15: (21, 30)}


def test_groups_smaller_than_the_pipeline_are_refused() -> None:
    with pytest.raises(InputError, match=re.escape("group_size must be at least the number of devices, 4, not 3")):
        generate("interleaved", 4, 8, group_size=3)


# At unit chunk times, B = 2: (devices, microbatches) -> bubble, peak.
@pytest.mark.parametrize(("d", "m", "bubble", "peak"), [(4, 8, 9, 11), (8, 32, 21, 23)])
def test_table_at_equal_times(d: int, m: int, bubble: int, peak: int) -> None:
    timeline = time_order(generate("interleaved", d, m, stages_per_device=2), Costs(F=1, B=2))
    assert (timeline.bubble, max(timeline.peak_in_flight)) == (bubble, peak)


# (local stages, microbatches, ranks) of test_pipeline_order in pytorch's test/distributed/pipelining/test_schedule.py.
TORCH_CASES = [
    (2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8),
    (4, 16, 4), (4, 32, 4), (4, 64, 4), (4, 16, 16), (4, 32, 32), (4, 128, 64),
    (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 4, 4), (2, 10, 4), (2, 15, 4),
]  # fmt: skip


@pytest.mark.parametrize(("v", "m", "d"), TORCH_CASES)
def test_as_short_and_as_small_as_torch(v: int, m: int, d: int) -> None:
    theirs = torch_order(v, m, d)
    ours = generate("interleaved", d, m, stages_per_device=v)
    costs = Costs(F=1, B=2)
    found, given = time_order(ours, costs), time_order(theirs, costs)
    assert check_order(ours).faults == check_order(theirs).faults == ()
    assert found.span <= given.span and found.makespan <= given.makespan
    assert all(mine <= other for mine, other in zip(found.peak_in_flight, given.peak_in_flight, strict=True))


def torch_order(v: int, m: int, d: int) -> Order:
    """What torch's ScheduleInterleaved1F1B would run.

    It comes from the private method that the constructor calls for every rank, so that no process group is needed; a
    torch that has renamed it skips the comparison.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, m // d)
    numbers = SimpleNamespace(
        n_local_stages=v,
        pp_group_size=d,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    try:
        plan = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
        rows = [[str(action) for action in plan(numbers, rank) if action is not None] for rank in range(d)]
    except AttributeError as error:
        pytest.skip(f"this torch plans its interleaved schedule elsewhere: {error}")
    return Order(Placement.looped(d, v), m, tuple(tuple(map(Pass.parse, row)) for row in rows))
