"""Looped BFS (arXiv 2211.05953): order, bubble, peak."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, check_order, generate, time_order


def test_a_small_order() -> None:
    order = generate("looped-bfs", 2, 2, stages_per_device=2)
    assert [" ".join(map(str, order.passes(device))) for device in range(2)] == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (5, 3), (5, 5), (7, 9), (8, 4)])
def test_bubble_and_peak(d: int, m: int, v: int) -> None:
    order = generate("looped-bfs", d, m, stages_per_device=v)
    report = check_order(order)
    assert report.faults == () and report.in_flight == (m * v,) * d
    for f, b in ((1, 2), (3, 4), (2, 1)):
        wait = (d - 1) + (v - 1) * max(0, d - m)
        assert time_order(order, Costs(F=f, B=b)).bubble == wait * (f + b)


def test_one_stage_per_device_is_gpipe() -> None:
    assert generate("looped-bfs", 4, 6, stages_per_device=1) == generate("gpipe", 4, 6)


def test_it_needs_a_stage() -> None:
    with pytest.raises(InputError, match="at least 1, not 0"):
        generate("looped-bfs", 4, 6, stages_per_device=0)
