"""Vocabulary passes in any order: spread, interlaced, for evaluation, and the list scheduling that spreads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import random_costs, random_order, words

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    MODES,
    SCHEDULES,
    Costs,
    Kind,
    Order,
    Placement,
    VocabularyMode,
    add_vocabulary,
    check_order,
    forward_only,
    generate,
    interlace,
    plan_order,
    time_order,
    without_offload,
)
from evenpipe.schedule.transforms.vocabulary import peak_limits

Sample = Callable[..., list[Any]]


# --- small orders in full ---------------------------------------------------------------------------------------------


def test_vocabulary_passes_on_two_devices() -> None:
    one, two = (add_vocabulary(generate("1f1b", 2, 3), mode) for mode in ("vocab-2", "vocab-1"))
    assert words(one, 0) == "E0 E1 0F0 0F1 S0 E2 C0 S1 T0 0F2 C1 0B0 S2 T1 C2 0B1 G0 T2 0B2 G1 G2"
    assert words(one, 1) == "E0 E1 1F0 S0 E2 C0 1F1 1B0 S1 T0 C1 1F2 1B1 S2 T1 C2 G0 1B2 T2 G1 G2"
    assert Kind.C not in {item.kind for item in two.passes(0)}
    assert words(two, 1) == "E0 E1 E2 1F0 S0 1F1 T0 S1 1F2 1B0 T1 S2 1B1 T2 G0 1B2 G1 G2"


def test_interlaced_passes_alternate_along_the_pipeline() -> None:
    order = interlace(generate("1f1b", 3, 4))
    assert words(order, 2) == "E0 E1 2F0 E2 S0 T0 2B0 2F1 E3 S1 T1 2B1 2F2 S2 T2 2B2 2F3 S3 T3 2B3 G0 G1 G2 G3"
    assert words(order, 1) == "E0 E1 1F0 E2 S0 T0 1F1 E3 S1 T1 1F2 1B0 S2 T2 1F3 1B1 S3 T3 1B2 G0 1B3 G1 G2 G3"
    assert words(order, 0) == "E0 0F0 E1 0F1 E2 S0 T0 0F2 E3 S1 T1 0F3 S2 T2 0B0 S3 T3 0B1 G0 0B2 G1 0B3 G2 G3"
    # Stage 0 on device 2: what alternates is the pipeline, not the numbers of devices.
    costs = Costs(F=[1, 2, 1], B=[2, 1, 3], S=1, T=1, E=0, G=0)
    turned = interlace(random_order(0, Placement(3, (2, 0, 1)), 6), costs)
    assert words(turned, 1).startswith("E0 E1 2F0 E2 S0 T0 2B0 2F1")


def test_orders_for_evaluation() -> None:
    order = forward_only(generate("1f1b", 3, 4))
    assert [words(order, device) for device in range(3)] == [f"{s}F0 {s}F1 {s}F2 {s}F3" for s in range(3)]
    assert (order.vocabulary, order.forward_only) == ("first-last", True)
    for mode in ("vocab-1", "vocab-2", "interlaced"):
        order = forward_only(plan_order("1f1b", 2, 4, mode))
        assert (order.vocabulary, order.forward_only) == ("vocab-2", True)
        assert words(order, 0) == "E0 E1 0F0 E2 0F1 E3 0F2 S0 0F3 S1 C0 S2 C1 S3 C2 C3"
        assert words(order, 1) == "E0 E1 E2 1F0 E3 1F1 S0 1F2 S1 C0 1F3 S2 C1 S3 C2 C3"
        assert forward_only(order) is order
    joint = forward_only(Order.from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1"))
    assert words(joint, 0) == "0F0 1F0 0F1 1F1"
    # Coarse times, which are tried as well, have none for forwards that are much shorter than backwards.
    costs = Costs(F=0.01, B=6, I=3, W=3, S=1, C=0.1, T=1, E=0.1, G=0.1)
    assert check_order(forward_only(plan_order("zb-h1", 2, 4, "vocab-2", costs), costs)).ok


# --- any order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCHEDULES, "random"])
@settings(max_examples=15)
@given(devices=st.integers(1, 6), microbatches=st.integers(1, 10), seed=st.integers(0, 10**6), equal=st.booleans())
@pytest.mark.sampled(5)
def test_any_order_keeps_to_its_peaks_and_halves_stay_together(
    name: str, devices: int, microbatches: int, seed: int, equal: bool
) -> None:
    """That what is made of it is sound is found in `test_planning`."""
    rng = random.Random(seed)
    try:
        if name == "random":
            placement = rng.choice([Placement.looped(devices, rng.randint(1, 3)), Placement.v_shape(devices)])
            order = random_order(seed, placement, microbatches, split=rng.random() < 0.5, eager=rng.random())
        else:
            order = without_offload(generate(name, devices, microbatches))
    except InputError:  # not made for this size
        return
    costs = EQUAL_COSTS if equal else random_costs(seed, order.placement)
    for mode in (VocabularyMode.VOCAB_2, VocabularyMode.VOCAB_1):
        held = check_order(add_vocabulary(order, mode, costs)).in_flight
        assert all(most <= limit for most, limit in zip(held, peak_limits(order, mode), strict=True))
    together = interlace(order, costs)
    for device in range(devices):
        row = list(together.passes(device))
        pairs = [(item, behind) for item, behind in pairwise(row) if item.kind is Kind.S]
        assert len(pairs) == microbatches
        assert all((behind.kind, behind.microbatch) == (Kind.T, item.microbatch) for item, behind in pairs)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1",
        # The vocabulary passes go between the parts.
        "(0F0;0B0)OVERLAP_F_B,(0F1;0I1)OVERLAP_F_B,0W1",
        "0F0,0B0\n1F0,(2F0;2B0)OVERLAP_F_B,1B0",
        "1F0,1B0\n0F0,0B0\n(2F0;2I0;2W0)OVERLAP_F_B",
        "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1",  # backwards are split for some microbatches only
        "0F0,0O0,0F1,0D0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1",
    ],
)
@pytest.mark.parametrize("costs", [EQUAL_COSTS, Costs(F=1, B=0, I=0, W=1, S=0, T=0, E=0, G=0, p2p=3)])
def test_odd_orders_stay_sound_and_passes_run_as_one_are_taken_apart(text: str, costs: Costs) -> None:
    base = Order.from_csv(text)
    if costs is not EQUAL_COSTS:
        costs = replace(costs, F=(2.0, 2.0, 0.0)[-base.placement.stages :])
    for order in (
        add_vocabulary(base, "vocab-2", costs),
        add_vocabulary(base, "vocab-1", costs),
        interlace(base, costs),
    ):
        assert check_order(order).ok
        assert not any(item.parts for device in range(order.devices) for item in order.passes(device))


TAKEN = "the order has the vocabulary passes of"
WITHOUT_TIME = "costs.F and costs.B of at least one stage must be above 0"
WHOLE, TWO = Order.from_csv("0F0,0B0"), generate("1f1b", 2, 2)
GATHERING = Order.from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD")
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: add_vocabulary(WHOLE, "interlaced"), 'mode is "interlaced"; it must be vocab-1 or vocab-2'),
    (lambda: add_vocabulary(WHOLE, "vocab-3"), 'vocabulary is "vocab-3"; it must be one of balanced'),
    (lambda: add_vocabulary(Order.from_csv("E0,0F0,S0,C0,T0,0B0,G0"), "vocab-2"), f"{TAKEN} vocab-2 already"),
    (lambda: add_vocabulary(GATHERING, "vocab-2"), "cannot be added between UNSHARD"),
    (lambda: add_vocabulary(TWO, "vocab-2", Costs(F=0, B=0)), WITHOUT_TIME),
    (lambda: interlace(Order.from_csv("E0,0F0,S0,T0,0B0,G0")), f"{TAKEN} vocab-1 already"),
    (lambda: interlace(Order.from_csv("0F0")), "an order that only evaluates cannot be interlaced"),
    (lambda: interlace(GATHERING), "cannot be added between UNSHARD"),
    (lambda: interlace(TWO, Costs(F=1)), "B is missing"),
    (lambda: interlace(random_order(0, Placement.looped(2, 2), 2), Costs(F=0, B=0)), WITHOUT_TIME),
]


def test_what_cannot_be_lowered() -> None:
    for call, message in REFUSED:
        with pytest.raises(InputError, match=message):
            call()


# --- memory and time of usual orders ----------------------------------------------------------------------------------


def test_in_flight_of_1f1b_is_exact(sample: Sample) -> None:
    """min(m, p - r), and one more for each barrier (arXiv 2411.05288, section 5.2); of interlaced passes half as much
    again: a device with d devices behind it holds d + ceil(d / 2) + 1."""
    for devices, microbatches in sample(product(range(1, 13), range(1, 31)), 40):
        base = generate("1f1b", devices, microbatches)
        for barriers, mode in enumerate(("vocab-2", "vocab-1"), 1):
            held = check_order(add_vocabulary(base, mode)).in_flight
            assert held == tuple(min(microbatches, devices - r + barriers) for r in range(devices))
        held = check_order(interlace(base)).in_flight
        assert held == tuple(min(microbatches, d + ceil(d / 2) + 1) for d in reversed(range(devices)))
        assert check_order(interlace(generate("gpipe", devices, microbatches))).in_flight == held
    assert check_order(add_vocabulary(generate("gpipe", 4, 6), "vocab-1")).in_flight == (6, 6, 6, 6)


def test_in_flight_is_exact_whatever_the_unit_of_time() -> None:
    for barriers, (forward, backward) in product((1, 2), [(0.1, 0.2), (1 / 3, 2 / 3), (18.522e-3, 27.423e-3), (1, 1)]):
        mode = ("vocab-2", "vocab-1")[barriers - 1]
        order = add_vocabulary(generate("1f1b", 8, 40), mode, Costs(F=forward, B=backward))
        assert check_order(order).in_flight == tuple(8 - r + barriers for r in range(8))


def test_no_device_waits_in_the_middle_of_interlaced_1f1b() -> None:
    """Bubble (p - 1)(F + B), as if the vocabulary passes were part of every device's own work."""
    for devices, microbatches in product(range(1, 9), (1, 2, 9, 32)):
        timeline = time_order(interlace(generate("1f1b", devices, microbatches)), EQUAL_COSTS)
        assert timeline.span - max(timeline.busy) == pytest.approx(3 * (devices - 1))


def test_evaluation_without_waiting(sample: Sample) -> None:
    """A further microbatch takes what every device needs for it: F of its stages, and S."""
    for name, barriers in sample(product(SCHEDULES, (0, 1)), 8):
        spans = []
        for microbatches in (16, 32):
            order = generate(name, 4, microbatches)
            evaluation = forward_only(add_vocabulary(order) if barriers else order)
            assert check_order(evaluation).ok
            spans.append(time_order(evaluation, EQUAL_COSTS).span)
        assert spans[1] - spans[0] == pytest.approx(16 * (order.placement.stages // 4 + 0.4 * barriers)), name


def test_no_device_waits_for_collectives_of_an_evaluation(sample: Sample) -> None:
    """A further microbatch takes F + S + C + E, though X and the statistics are under way for a while."""
    slow = {"broadcast": 0.1, "statistics": 0.9}
    for mode, name, output in sample(product(MODES[2:], ["gpipe", "1f1b"], [0.2, 1.0, 3.0]), 4):
        costs = Costs(F=1, B=2, S=output, C=0.1, T=1, E=0.1, G=0, collectives=slow)
        spans = [time_order(forward_only(plan_order(name, 4, m, mode)), costs).span for m in (40, 80)]
        assert (spans[1] - spans[0]) / 40 == pytest.approx(1.2 + output)
