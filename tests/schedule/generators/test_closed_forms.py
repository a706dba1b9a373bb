"""Bubbles and peaks of the schedules with a closed form: equal and unequal passes, any number of microbatches.

The papers: interleaved 1F1B (2104.04473), looped BFS (2211.05953), ZB-H1, ZB-H2 and ZB-V (2401.10241), V-Half and V-Min
(2405.15362), GIS of PipeOffload (2503.01328).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import ceil, gcd
from typing import Any, NamedTuple

import pytest

from evenpipe.schedule import EQUAL_COSTS, Costs, Placement, check_order, generate, time_order
from evenpipe.schedule.generators.grouped import smallest_group

WHOLE = [Costs(F=f, B=b) for f, b in ((1, 2), (3, 4), (2, 1))]
MANY = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 23)
"""Numbers of microbatches."""


class Case(NamedTuple):
    """An order, the peak in stage activations of each device (or of the fullest one), and its bubble by costs."""

    name: str
    devices: int
    microbatches: int
    peaks: tuple[int, ...] | int
    bubbles: list[tuple[Costs, float]]
    options: dict[str, Any]


def gpipe_and_1f1b() -> Iterator[Case]:
    for d, m in product(range(1, 7), (1, 2, 5, 9)):
        bubbles = [(costs, (d - 1) * (costs.F + costs.B)) for costs in (*WHOLE, Costs(F=0.3, B=0.7))]
        yield Case("gpipe", d, m, (m,) * d, bubbles, {})
        yield Case("1f1b", d, m, tuple(min(m, d - device) for device in range(d)), bubbles, {})


def interleaved() -> Iterator[Case]:
    for d, v, m in product((1, 2, 3, 4, 5, 8), (2, 3, 4), MANY):
        group = -(-m // max(1, m // d))
        peaks = tuple(min(m * v, (v - 1) * group + 2 * (d - 1 - device) + 1) for device in range(d))
        bubbles = [(costs, (d - 1 + (v - 1) * max(0, d - m)) * (costs.F + costs.B)) for costs in WHOLE]
        yield Case("interleaved", d, m, peaks, bubbles, {"stages_per_device": v})


def looped_bfs() -> Iterator[Case]:
    sizes = [(1, 1), (1, 4), (2, 1), (3, 2), (4, 8), (5, 3), (5, 5), (7, 9), (8, 4)]
    for v, (d, m) in product((1, 2, 3, 4), sizes):
        bubbles = [(costs, (d - 1 + (v - 1) * max(0, d - m)) * (costs.F + costs.B)) for costs in WHOLE]
        yield Case("looped-bfs", d, m, (m * v,) * d, bubbles, {"stages_per_device": v})


def zero_bubble() -> Iterator[Case]:
    """For W <= min(F, I)."""
    times = [(1, 1, 1), (3, 4, 2), (4, 3, 2), (5, 3, 3), (3, 5, 3), (10, 10, 1)]
    for d, m in product((1, 2, 3, 4, 5, 8), MANY):
        for name, hop in (("zb-h1", 1), ("zb-h2", 2)):
            ahead = min(m, hop * (d - 1) + 1)
            bubbles = [(Costs(F=f, I=i, W=w), (d - 1) * (f + i) - (ahead - 1) * w) for f, i, w in times]
            yield Case(name, d, m, (ahead,) * d, bubbles, {})


def zbv() -> Iterator[Case]:
    for d in (1, 2, 3, 4, 5, 8, 12, 16):
        for m in (2 * d - 1, 2 * d, 3 * d + 1):
            yield Case("zbv", d, m, (2 * d,) * d, [(EQUAL_COSTS, 0)], {})


def v_half_and_v_min() -> Iterator[Case]:
    for d in (4, 5, 6, 7, 8, 9, 10, 12, 16):
        for m in (2 * d, 2 * d + 5, 4 * d):
            yield Case("v-half", d, m, (2 * ((d + 2) // 2),) * d, [(EQUAL_COSTS, 6 * -(-d // 2) - 7)], {})
            bubble = 4 * d - (7 if d % 3 == 0 else 5)
            yield Case("v-min", d, m, 2 * ((d + 4) // 3), [(EQUAL_COSTS, bubble)], {})


def dualpipe_v() -> Iterator[Case]:
    for d, more, w in product((1, 2, 3, 4, 5, 8), (0, 1, 7), (0, 0.5, 1)):
        costs, f, b = Costs(F=1, I=1, W=w), 1, 1 + w
        peaks = (2 * d + 1,) * d
        yield Case("dualpipe-v", d, 2 * d + more, peaks, [(costs, (d - 1) * (f + 2 * b - 3 * w))], {})
        apart = [(costs, (d - 1) * (f + b - 2 * w))]
        yield Case("dualpipe-v", d, 2 * d + more, peaks, apart, {"overlap": False})


def gis() -> Iterator[Case]:
    """For F + I + W >= 2 max(F, I), so that half the devices are a large enough group, and W <= F + I."""
    times = [(1, 1, 1), (3, 4, 2), (2, 3, 1), (4, 2, 3), (1, 1, 0), (10.4, 10.2, 7.7), (1, 2, 3), (5, 1, 4)]
    for d, v in product((2, 3, 4, 5, 6, 7, 8, 12), (2, 3, 4, 6)):
        for g in range(ceil(d / 2), d + 1):
            bubbles = [
                (Costs(F=f, I=i, W=w), (d - 1) * (f + i) + (v - 1) * ((d - g) * f + max(0, d * i - g * (i + w))))
                for f, i, w in times
            ]
            peaks = tuple(g * (v - 1) + d - device for device in range(d))
            yield Case("gis", d, 4 * g, peaks, bubbles, {"stages_per_device": v, "group_size": g})


def gis_in_small_groups() -> Iterator[Case]:
    sizes = [(d, v, 1) for d, v in product(range(2, 13), range(2, 9))]
    for d, v, g in (*sizes, (8, 3, 2), (8, 4, 2), (12, 4, 3), (9, 2, 4)):
        spread = ceil(ceil(d / 2) / g)
        fixed = spread * g * (v - 1) + g * (gcd(spread, v) - 1)
        peaks = tuple(fixed + d - device for device in range(d))
        yield Case("gis", d, (3 if g == 1 else 6) * d, peaks, [], {"stages_per_device": v, "group_size": g})


FORMS: list[Callable[[], Iterator[Case]]] = [
    *(gpipe_and_1f1b, interleaved, looped_bfs, zero_bubble, zbv, v_half_and_v_min, dualpipe_v, gis),
    gis_in_small_groups,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_bubbles_and_peaks(form: Callable[[], Iterator[Case]], sample: Callable[..., list[Case]]) -> None:
    wrong = []
    for case in sample(form(), 20):
        order = generate(case.name, case.devices, case.microbatches, **case.options)
        report = check_order(order)
        peaks = report.in_flight if isinstance(case.peaks, tuple) else max(report.in_flight)
        if report.faults or peaks != case.peaks:
            wrong.append((case, report.faults, peaks))
        bubbles = [time_order(order, costs).bubble for costs, _ in case.bubbles]
        if bubbles != pytest.approx([bubble for _, bubble in case.bubbles]):
            wrong.append((case, bubbles))
    assert not wrong


def test_few_microbatches_of_dualpipe_v_are_as_quick_as_can_be() -> None:
    """The first microbatch goes out and back through all stages, the others follow right behind, then a last W."""
    for d in (2, 3, 4, 8):
        for m in range(1, d + 1):
            timeline = time_order(generate("dualpipe-v", d, m), EQUAL_COSTS)
            assert timeline.makespan == 4 * d + 4 * (m - 1) + 2
            assert max(timeline.peak_in_flight) == 2 * m


def test_groups_of_interleaved_schedules() -> None:
    """Gaps of groups with fewer microbatches than devices are a constant, however many groups there are."""
    for d, v, m in product((1, 2, 3, 4, 5, 8), (2, 3, 4), (1, 3, 4, 5, 9, 13, 15, 23)):
        for size in (d, d + 1, d + 3):
            order = generate("interleaved", d, m, stages_per_device=v, group_size=size)
            for device, peak in enumerate(check_order(order).in_flight):
                assert peak <= min(m * v, (v - 1) * size + 2 * (d - 1 - device) + 1)
            few = (v - 1) * max(0, d - m)
            bubble = time_order(order, Costs(F=1, B=2)).bubble
            assert 3 * (d - 1 + few) <= bubble <= 3 * (d - 1 + few + (v - 1) * (d - 1))


def test_gis_h_takes_the_smallest_group_whose_bubble_does_not_grow() -> None:
    times = [((1, 1, 1), 4), ((3, 4, 2), 4), ((3, 1, 0.5), 6), ((1, 3, 1), 5), ((10, 1, 1), 7), ((1, 1, 0), 4)]
    for (f, i, w), group in (*times, ((1, 0, 0), 8)):
        costs = Costs(F=f, I=i, W=w)
        assert generate("gis-h", 8, 64, costs=costs) == generate("gis", 8, 64, group_size=group)
        for size in (group, group - 1):
            few, many = (time_order(generate("gis", 8, n * size, group_size=size), costs).bubble for n in (4, 8))
            assert many - few == pytest.approx(0) if size == group else group == 4 or many - few > 0.1


def test_the_group_of_gis_h_covers_hops_and_uneven_stages() -> None:
    placement = Placement.looped(4, 2)
    for group, costs in (
        (2, Costs(F=1, I=1, W=1)),
        (3, Costs(F=1, I=1, W=1, p2p=1)),
        (3, Costs(F=1, I=1, W=1, links={"p2p": {"latency": 1}})),
        # The busiest device works 8 for each microbatch, 4 per chunk; the way through the second chunk takes 9.
        (3, Costs(F=[1, 1, 1, 1, 1, 1, 1, 6], I=0.5, W=0)),
        (2, Costs(F=1, B=2)),
    ):
        assert smallest_group(placement, costs) == group, costs
    few, many = (
        time_order(generate("gis", 8, m, group_size=1, costs=costs), costs).bubble
        for costs in [Costs(F=3, I=1, W=0.5)]
        for m in (32, 64)
    )
    assert few == pytest.approx(many), "groups of one are spread by costs"
