"""V-Half and V-Min: the tables of arXiv 2405.15362, and what the authors' scheduler reaches with unequal passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import EQUAL_COSTS, Costs, check_order, generate, time_order
from evenpipe.schedule.generators import v_half, v_min, zbv
from evenpipe.schedule.generators.v_shape_blocks import block_of_gaps, collides, peaks, repeat
from evenpipe.schedule.generators.v_shape_fixed import half_block, min_block

DEVICES = (4, 5, 6, 7, 8, 9, 10, 12, 16)


def half_bubble(devices):
    return 6 * -(-devices // 2) - 7


def min_bubble(devices):
    return 4 * devices - (7 if devices % 3 == 0 else 5)


def sizes():
    return [(devices, m) for devices in DEVICES for m in (2 * devices, 2 * devices + 5, 4 * devices)]


@pytest.mark.parametrize(("devices", "microbatches"), sizes())
def test_v_half_takes_half_the_memory_on_every_device(devices, microbatches):
    timeline = time_order(v_half(devices, microbatches), EQUAL_COSTS)
    assert timeline.peak_in_flight == (2 * ((devices + 2) // 2),) * devices
    assert timeline.bubble == half_bubble(devices)


@pytest.mark.parametrize(("devices", "microbatches"), sizes())
def test_v_min_takes_a_third(devices, microbatches):
    timeline = time_order(v_min(devices, microbatches), EQUAL_COSTS)
    assert max(timeline.peak_in_flight) == 2 * ((devices + 4) // 3)
    assert timeline.bubble == min_bubble(devices)


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "bubble", "peak"),
    [
        ("zbv", 4, 8, 0, 8),
        ("v-half", 4, 8, 5, 6),
        ("v-min", 4, 8, 11, 4),
        ("zbv", 8, 32, 0, 16),
        ("v-half", 8, 32, 17, 10),
        ("v-min", 8, 32, 27, 8),
        # few devices
        ("v-half", 1, 4, 0, 2),
        ("v-half", 2, 8, 1, 4),
        ("v-half", 3, 8, 5, 4),
        ("v-min", 1, 4, 0, 2),
        ("v-min", 2, 8, 3, 4),
        ("v-min", 3, 8, 5, 4),
        # few microbatches
        ("v-half", 8, 1, 27, 2),
        ("v-half", 8, 2, 23, 4),
        ("v-half", 8, 4, 15, 8),
        ("v-half", 8, 8, 19, 10),
        ("v-min", 8, 1, 27, 2),
        ("v-min", 8, 4, 15, 8),
        ("v-min", 8, 8, 27, 8),
    ],
)
def test_known_sizes(name, devices, microbatches, bubble, peak):
    timeline = time_order(generate(name, devices, microbatches), EQUAL_COSTS)
    assert (timeline.bubble, max(timeline.peak_in_flight)) == (bubble, peak)


@pytest.mark.parametrize(
    ("generator", "times", "bubbles"),
    [
        (v_min, (3, 4, 2), (183, 279, 471)),
        (v_min, (10.4, 10.2, 7.7), (365.1, 457.9, 643.5)),
        (v_half, (3, 4, 2), (81, 81, 81)),
        (v_half, (10.4, 10.2, 7.7), (200.3, 200.3, 200.3)),
        (v_half, (1, 1.4, 1), (25.4, 25.4, 25.4)),  # W + 2 F >= 2 I: constant
        (v_half, (1, 1.6, 1), (31.4, 34.6, 41.0)),  # just outside: grows
        (v_half, (2, 1, 0.5), (53.5, 77.5, 125.5)),
    ],
)
def test_unequal_passes_on_8_devices(generator, times, bubbles):
    forward, inputs, weights = times
    costs = Costs(F=forward, I=inputs, W=weights)
    found = [time_order(generator(8, microbatches), costs).bubble for microbatches in (16, 32, 64)]
    assert found == pytest.approx(bubbles)


@pytest.mark.parametrize("microbatches", [32, 64])
@pytest.mark.parametrize(("generator", "bubble", "peak"), [(v_half, 26, 10), (v_min, 27, 8)])
def test_repeated_blocks_that_are_not_squeezed(generator, bubble, peak, microbatches):
    order = generator(8, microbatches, squeeze=False)
    timeline = time_order(order, EQUAL_COSTS)
    assert check_order(order).ok
    assert (timeline.bubble, max(timeline.peak_in_flight)) == (bubble, peak)


@given(devices=st.integers(1, 9), microbatches=st.integers(1, 20), squeeze=st.booleans())
def test_any_size_is_sound_and_within_its_memory(devices, microbatches, squeeze):
    for generator, peak in ((v_half, 2 * ((devices + 2) // 2)), (v_min, 2 * ((devices + 4) // 3))):
        report = check_order(generator(devices, microbatches, squeeze=squeeze))
        assert report.ok, str(report)
        assert max(report.in_flight) <= peak
    report = check_order(zbv(devices, microbatches))
    assert report.ok, str(report)
    assert max(report.in_flight) <= 2 * devices


@pytest.mark.parametrize("devices", range(1, 20))
def test_blocks_of_the_paper_repeat_without_collision(devices):
    assert not collides(half_block(devices))
    assert not collides(min_block(devices))
    assert collides(block_of_gaps([6] * (4 * devices - 1)))


@given(gaps=st.lists(st.integers(1, 7), min_size=15, max_size=15))
def test_peaks_of_a_block_are_those_of_its_repetition(gaps):
    block = block_of_gaps(gaps)
    if collides(block):
        return
    for row, expected in zip(repeat(block, 40), peaks(block), strict=True):
        held = most = 0
        for slot in sorted(row):
            held += 1 - row[slot][0] // 8
            most = max(most, held)
        assert most == expected
