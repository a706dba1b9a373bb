"""What the vocabulary transform costs on every schedule, with equal stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from schedule_oracle import by_virtual_times

from evenpipe.schedule import EQUAL_COSTS, Kind, Order, add_vocabulary, check_order, generate, interlace, time_order

RAW = {"squeeze": False}
FOUR = {"stages_per_device": 4}

# F = I = W = 1, B = 2, S = T = 0.4, C = E = G = 0, p = 8; bubble = span - work of the busiest device, then the peak in
# stage activations of the fullest device. The same for 32 and 64 microbatches.
GOLDENS = [
    # schedule, options, base, one barrier, two barriers
    ("gpipe", {}, (21.0, None), (21.0, None), (21.0, None)),  # peak: all microbatches
    ("1f1b", {}, (21.0, 8), (20.6, 9), (21.0, 10)),
    ("zb-h1", {}, (7.0, 8), (7.0, 9), (7.0, 10)),
    ("zb-h2", {}, (0.0, 15), (7.0, 16), (7.0, 17)),
    ("interleaved", {}, (21.0, 23), (21.0, 25), (21.4, 27)),
    ("interleaved", FOUR, (21.0, 39), (21.0, 43), (21.0, 47)),
    ("looped-bfs", {}, (21.0, None), (21.0, None), (21.0, None)),
    ("zbv", {}, (0.0, 16), (7.0, 18), (7.0, 20)),
    ("v-half", RAW, (26.0, 10), (18.0, 12), (15.6, 14)),
    ("v-min", RAW, (27.0, 8), (31.8, 10), (26.0, 12)),
    ("gis", {}, (14.0, 16), (12.6, 18), (12.0, 20)),
    ("dualpipe-v", {}, (14.0, 17), (10.6, 19), (8.2, 21)),
]

# What sorting by virtual time alone is known to reach, and is to be beaten or met.
PLAIN = {
    "1f1b": ((21.0, 9), (21.6, 10)),
    "zb-h1": ((8.0, 9), (8.4, 10)),
    "interleaved": ((21.0, 25), (23.2, 27)),
    "v-half": ((28.0, 12), (33.2, 14)),
    "v-min": ((32.2, 10), (38.2, 12)),
}


def measured(order: Order) -> tuple[float, int]:
    timeline = time_order(order, EQUAL_COSTS)
    bubble = timeline.span - max(timeline.busy)
    assert timeline.bubble == pytest.approx(bubble, abs=1e-6)
    return bubble, max(timeline.peak_in_flight)


@pytest.mark.parametrize("microbatches", [32, 64])
@pytest.mark.parametrize(("name", "options", "goldens"), [(name, options, rest) for name, options, *rest in GOLDENS])
def test_bubble_and_peak(
    name: str, options: dict[str, Any], goldens: list[tuple[float, int | None]], microbatches: int
) -> None:
    order = generate(name, 8, microbatches, **options)
    for barriers, (bubble, peak) in enumerate(goldens):
        lowered = add_vocabulary(order, barriers) if barriers else order
        reached = measured(lowered)
        assert reached[0] == pytest.approx(bubble, abs=1e-6)
        assert reached[1] == peak or peak is None
        if barriers and options != FOUR and name in PLAIN:
            assert reached[0] <= PLAIN[name][barriers - 1][0] + 1e-6
            assert reached[1] <= PLAIN[name][barriers - 1][1]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zbv"])
def test_spans_grow_to_the_makespan(name: str) -> None:
    """E and G put every device to work from the first moment to the last: zb-h2 and zbv, whose devices start and end at
    different times and have no bubble for that, get one of p - 1, as zb-h1 has. The makespan does not grow."""
    base = time_order(generate(name, 8, 32), EQUAL_COSTS)
    lowered = time_order(add_vocabulary(generate(name, 8, 32), 1), EQUAL_COSTS)
    vocabulary_work = 32 * 0.8
    assert base.makespan == pytest.approx(32 * 3 * (2 if name == "zbv" else 1) + 7)
    assert lowered.makespan == lowered.span == pytest.approx(base.makespan + vocabulary_work)
    assert base.span == pytest.approx(base.makespan - (0 if name == "zb-h1" else 7))


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "one", "two"),
    [  # how much shorter than sorted rows, in percent
        ("v-half", 4, 4, 20.3, 23.1),
        ("v-half", 8, 4, 17.2, 17.9),
        ("v-half", 8, 8, 12.3, 17.8),
        ("v-min", 4, 2, 22.4, 22.1),
        ("v-min", 4, 4, 13.5, 34.0),
        ("v-min", 8, 4, 14.8, 25.9),
        ("zbv", 4, 4, 12.0, 13.3),
        ("zbv", 8, 4, 9.8, 8.0),
    ],
)
def test_lists_pay_most_with_few_microbatches(
    name: str, devices: int, microbatches: int, one: float, two: float
) -> None:
    options = {} if name == "zbv" else RAW
    order = generate(name, devices, microbatches, **options)
    for barriers, percent in ((1, one), (2, two)):
        by_time = time_order(by_virtual_times(order, barriers, EQUAL_COSTS), EQUAL_COSTS)
        better = time_order(add_vocabulary(order, barriers), EQUAL_COSTS)
        assert 100 * (1 - better.span / by_time.span) == pytest.approx(percent, abs=0.06)


# Bubbles as in GOLDENS, m = 32, when X and the rows take 0.1 and the statistics and dX 0.3: of the order made for that,
# and of the one made for collectives that take no time.
LATE = {"broadcast": 0.1, "statistics": 0.3, "reduce": 0.3, "embedding": 0.1}


@pytest.mark.parametrize(
    ("name", "barriers", "foreseen", "unforeseen"),
    [
        ("1f1b", 1, 21.5, 24.4),
        ("1f1b", 2, 21.2, 27.6),
        ("interleaved", 1, 21.3, 21.4),
        ("interleaved", 2, 21.9, 21.9),
        ("zb-h1", 1, 7.1, 7.4),
        ("zb-h1", 2, 7.4, 16.2),
        ("zbv", 1, 7.1, 7.1),
        ("zbv", 2, 7.2, 7.4),
        ("gis", 1, 13.1, 12.7),
        ("gis", 2, 12.1, 12.1),
    ],
)
def test_collectives_that_take_time(name: str, barriers: int, foreseen: float, unforeseen: float) -> None:
    order, late = generate(name, 8, 32), replace(EQUAL_COSTS, collectives=LATE)
    for costs, bubble in ((late, foreseen), (EQUAL_COSTS, unforeseen)):
        assert time_order(add_vocabulary(order, barriers, costs), late).bubble == pytest.approx(bubble, abs=0.06)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zbv", "v-half", "v-min", "gis", "gis-h"])
def test_interlaced_costs_nothing_where_passes_are_aligned(name: str) -> None:
    """With split backwards and equal times all devices are between two passes when the last stage's forward ends: the
    bubble is that of the base order, or its skew where that is more, and so is the peak."""
    base = generate(name, 8, 32)
    timeline = time_order(base, EQUAL_COSTS)
    bubble, peak = measured(interlace(base))
    assert bubble == pytest.approx(timeline.makespan - max(timeline.busy))
    assert peak == max(timeline.peak_in_flight)


@pytest.mark.parametrize(("microbatches", "bubble"), [(32, 52.0), (64, 84.0)])
def test_interlaced_waits_for_whole_backwards_of_several_stages(microbatches: int, bubble: float) -> None:
    """Interleaved: some device is always in the middle of a B, one unit away from its end, in every microbatch."""
    order = generate("interleaved", 8, microbatches)
    assert measured(interlace(order)) == (pytest.approx(bubble), 23)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "v-half"])
def test_few_wait_between_the_halves(name: str) -> None:
    """Between S and T a device keeps probabilities, between E and F rows: of few microbatches, of however many."""
    order = add_vocabulary(generate(name, 8, 64), 1)
    for device in range(8):
        kept = {Kind.S: 0, Kind.E: 0}
        most = dict(kept)
        for item in order.passes(device):
            if item.kind in kept:
                kept[item.kind] += 1
                most[item.kind] = max(most[item.kind], kept[item.kind])
            elif item.kind is Kind.T:
                kept[Kind.S] -= 1
            elif item.kind is Kind.F and item.stage == 0:
                kept[Kind.E] -= 1
        assert most[Kind.S] <= 3
        assert most[Kind.E] <= 8 or device > 0
    assert check_order(order).ok
