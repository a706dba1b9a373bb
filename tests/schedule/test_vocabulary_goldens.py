"""What the vocabulary transform costs on every schedule, with equal stages and with stages that differ."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Kind,
    Order,
    Placement,
    add_vocabulary,
    generate,
    interlace,
    time_order,
)

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


def measured(order: Order) -> tuple[float, int]:
    timeline = time_order(order, EQUAL_COSTS)
    bubble = timeline.span - max(timeline.busy)
    assert timeline.bubble == pytest.approx(bubble, abs=1e-6)
    return bubble, max(timeline.peak_in_flight)


@pytest.mark.parametrize("microbatches", [32, 64])
@pytest.mark.parametrize(("name", "options", "goldens"), [(name, options, rest) for name, options, *rest in GOLDENS])
@pytest.mark.sampled(6)
def test_bubble_and_peak(
    name: str, options: dict[str, Any], goldens: list[tuple[float, int | None]], microbatches: int
) -> None:
    order = generate(name, 8, microbatches, **options)
    for barriers, (bubble, peak) in enumerate(goldens):
        lowered = add_vocabulary(order, ("vocab-2", "vocab-1")[barriers - 1]) if barriers else order
        reached = measured(lowered)
        assert reached[0] == pytest.approx(bubble, abs=1e-6)
        assert reached[1] == peak or peak is None


# Bubbles as in GOLDENS, m = 32, when X and the rows take 0.1 and the statistics and dX 0.3.
LATE = {"broadcast": 0.1, "statistics": 0.3, "reduce": 0.3, "embedding": 0.1}
FORESEEN = [
    # schedule, barriers, bubble of the order made for that, and of the one made for collectives that take no time
    *[("1f1b", 1, 21.5, 24.4), ("1f1b", 2, 21.2, 27.6), ("interleaved", 1, 21.3, 21.4), ("interleaved", 2, 21.9, 21.9)],
    *[("zb-h1", 1, 7.1, 7.4), ("zb-h1", 2, 7.4, 16.2), ("zbv", 1, 7.1, 7.1), ("zbv", 2, 7.2, 7.4)],
    *[("gis", 1, 13.1, 12.7), ("gis", 2, 12.1, 12.1)],
]


@pytest.mark.parametrize(("name", "barriers", "foreseen", "unforeseen"), FORESEEN)
def test_collectives_that_take_time(name: str, barriers: int, foreseen: float, unforeseen: float) -> None:
    order, late = generate(name, 8, 32), replace(EQUAL_COSTS, collectives=LATE)
    for costs, bubble in ((late, foreseen), (EQUAL_COSTS, unforeseen)):
        assert time_order(
            add_vocabulary(order, ("vocab-2", "vocab-1")[barriers - 1], costs), late
        ).bubble == pytest.approx(bubble, abs=0.06)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zbv", "v-half", "v-min", "gis", "gis-h"])
def test_interlaced_costs_nothing_where_passes_are_aligned(name: str) -> None:
    """With split backwards and equal times all devices are between two passes when the last stage's forward ends: the
    bubble is that of the base order, or its skew where that is more, and so is the peak."""
    base = generate(name, 8, 32)
    timeline = time_order(base, EQUAL_COSTS)
    bubble, peak = measured(interlace(base))
    assert bubble == pytest.approx(timeline.makespan - max(timeline.busy))
    assert peak == max(timeline.peak_in_flight)


def test_interlaced_waits_for_whole_backwards_of_several_stages() -> None:
    """Interleaved: some device is always in the middle of a B, one unit away from its end, in every microbatch."""
    for microbatches, bubble in ((32, 52.0), (64, 84.0)):
        assert measured(interlace(generate("interleaved", 8, microbatches))) == (pytest.approx(bubble), 23)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "v-half"])
def test_few_wait_between_the_halves(name: str) -> None:
    """Between S and T a device keeps probabilities, between E and F rows: of few microbatches, of however many."""
    order = add_vocabulary(generate(name, 8, 64), "vocab-2")
    ends = {Kind.T: Kind.S, Kind.F: Kind.E}
    for device in range(8):
        kept = {Kind.S: 0, Kind.E: 0}
        for item in order.passes(device):
            if item.kind in kept:
                kept[item.kind] += 1
            elif item.kind in ends and not item.stage:
                kept[ends[item.kind]] -= 1
            assert kept[Kind.S] <= 3 and (kept[Kind.E] <= 8 or device > 0)


def test_rows_of_the_embedding_do_not_pile_up() -> None:
    """E needs nothing, but waits until the first stage has come near, on devices that have nothing but time."""
    order, costs = generate("1f1b", 4, 40), Costs(F=[4, 1, 1, 1], B=[4, 1, 1, 1], S=0.1, T=0.1, E=0.1, G=0.1)
    rows = time_order(add_vocabulary(order, "vocab-2", costs), costs).events
    starts = {(event.device, str(event.item)): event.start for row in rows for event in row}
    for device, microbatch in product(range(1, 4), range(8, 40)):
        assert starts[device, f"E{microbatch}"] >= starts[0, f"0F{microbatch - 6}"]


# --- stages that differ -----------------------------------------------------------------------------------------------


def per_stage(seed: int, placement: Placement) -> Costs:
    """F, I and W of every stage from 0.5 to 1.5, the vocabulary passes alike on all devices."""
    rng = random.Random(seed)
    times = [[rng.uniform(0.5, 1.5) for _ in range(placement.stages)] for _ in range(3)]
    return Costs(F=times[0], I=times[1], W=times[2], S=0.4, T=0.4, E=0.02, G=0.02)


def bubble_and_span(order: Order, costs: Costs) -> tuple[float, float]:
    timeline = time_order(order, costs)
    return timeline.span - max(timeline.busy), timeline.span


# Bubble in percent of the span, mean of seeds 0 to 4, p = 8, m = 64, one barrier: of the base order, and of what the
# transform gives.
BUBBLES = [
    ("1f1b", {}, 6.3, 5.1),
    ("interleaved", FOUR, 4.7, 2.9),
    ("zb-h1", {}, 1.7, 1.4),
    ("zb-h2", {}, 0.2, 1.1),  # the span of the base order grows to its makespan, as for zbv
    ("zbv", {}, 0.3, 0.7),
    ("v-half", RAW, 4.3, 2.2),
    ("v-min", {}, 7.0, 3.5),
    ("gis", {**FOUR, "group_size": 4}, 5.8, 2.3),
]


@pytest.mark.parametrize(("name", "options", "base", "result"), BUBBLES)
@pytest.mark.sampled(1)
def test_bubbles_of_stages_that_differ(name: str, options: dict[str, Any], base: float, result: float) -> None:
    shares = []
    for seed in range(5):
        order = generate(name, 8, 64, **options)
        costs = per_stage(seed, order.placement)
        orders = (order, add_vocabulary(order, "vocab-2", costs))
        shares.append([100 * bubble / span for bubble, span in (bubble_and_span(item, costs) for item in orders)])
    assert [sum(column) / 5 for column in zip(*shares, strict=True)] == pytest.approx([base, result], abs=0.06)
