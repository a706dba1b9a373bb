"""Vocabulary passes in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import by_virtual_times, random_costs, random_order, words

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Kind,
    Order,
    Pass,
    Placement,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    forward_only,
    generate,
    interlace,
    time_order,
)
from evenpipe.schedule.passes import VOCABULARY_KINDS
from evenpipe.schedule.transforms.vocabulary import peak_limits


def test_one_barrier_on_two_devices() -> None:
    order = add_vocabulary(generate("1f1b", 2, 3), 1)
    assert words(order, 0) == "E0 E1 0F0 0F1 S0 E2 C0 S1 T0 0F2 C1 0B0 S2 T1 C2 0B1 G0 T2 0B2 G1 G2"
    assert words(order, 1) == "E0 E1 1F0 S0 E2 C0 1F1 1B0 S1 T0 C1 1F2 1B1 S2 T1 C2 G0 1B2 T2 G1 G2"


def test_two_barriers_on_two_devices() -> None:
    order = add_vocabulary(generate("1f1b", 2, 3), 2)
    assert Kind.C not in {item.kind for item in order.passes(0)}
    assert words(order, 1) == "E0 E1 E2 1F0 S0 1F1 T0 S1 1F2 1B0 T1 S2 1B1 T2 G0 1B2 G1 G2"


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("devices", range(1, 13))
@pytest.mark.sampled(8)
def test_in_flight_of_1f1b_is_exact(devices: int, barriers: int) -> None:
    """min(m, p - r), and one more for each barrier (arXiv 2411.05288, section 5.2)."""
    for microbatches in range(1, 31):
        base = generate("1f1b", devices, microbatches)
        report = check_order(base)
        assert report.in_flight == tuple(min(microbatches, devices - r) for r in range(devices))
        report = check_order(add_vocabulary(base, barriers))
        assert report.ok
        assert report.in_flight == tuple(min(microbatches, devices - r + barriers) for r in range(devices))


@pytest.mark.parametrize(("forward", "backward"), [(0.1, 0.2), (1 / 3, 2 / 3), (18.522e-3, 27.423e-3), (1, 1)])
def test_in_flight_is_exact_whatever_the_unit_of_time(forward: float, backward: float) -> None:
    for barriers in (1, 2):
        order = add_vocabulary(generate("1f1b", 8, 40), barriers, Costs(F=forward, B=backward))
        assert check_order(order).in_flight == tuple(8 - r + barriers for r in range(8))


@pytest.mark.parametrize("barriers", [1, 2])
def test_gpipe_holds_what_it_held(barriers: int) -> None:
    assert check_order(add_vocabulary(generate("gpipe", 4, 6), barriers)).in_flight == (6, 6, 6, 6)


def interleaved(devices: int, microbatches: int, stages_per_device: int) -> Order:
    """Interleaved 1F1B as Megatron runs it (arXiv 2104.04473); microbatches a multiple of devices."""
    rows, ring = [], devices * stages_per_device
    for device in range(devices):

        def item(kind: Kind, k: int, device: int = device) -> Pass:
            turn = k % ring // devices
            stage = (turn if kind is Kind.F else stages_per_device - 1 - turn) * devices + device
            return Pass(kind, stage, k // ring * devices + k % devices)

        total = microbatches * stages_per_device
        ahead = min(total, 2 * (devices - 1 - device) + (stages_per_device - 1) * devices)
        row = [item(Kind.F, k) for k in range(ahead)]
        for k in range(total - ahead):
            row += [item(Kind.F, k + ahead), item(Kind.B, k)]
        rows.append((*row, *(item(Kind.B, k) for k in range(total - ahead, total))))
    return Order(Placement.looped(devices, stages_per_device), microbatches, tuple(rows))


def split_backwards(devices: int, microbatches: int) -> Order:
    """ZB-H1: every device runs its weight gradients p - 1 turns behind (arXiv 2401.10241)."""
    rows = []
    for device in range(devices):
        lags = {Kind.F: 0, Kind.I: devices - 1 - device, Kind.W: devices - 1}
        turns = range(microbatches + devices - 1)
        row = [Pass(kind, device, turn - lag) for turn in turns for kind, lag in lags.items()]
        rows.append(tuple(item for item in row if 0 <= item.microbatch < microbatches))
    return Order(Placement.linear(devices), microbatches, tuple(rows))


@pytest.mark.parametrize(
    ("order", "peaks"),
    [
        (interleaved(8, 32, 2), (23, 25, 27)),
        (interleaved(4, 16, 3), (15, 18, 21)),
        (split_backwards(8, 32), (8, 9, 10)),
    ],
)
def test_any_number_of_stages_and_split_backwards(order: Order, peaks: tuple[int, int, int]) -> None:
    """Peaks of the sorted order grow by one stage activation for each barrier and stage of a device."""
    for barriers, peak in enumerate(peaks):
        lowered = add_vocabulary(order, barriers) if barriers else order
        assert check_program(add_communication(lowered)).ok
        assert check_program(add_communication(forward_only(lowered))).ok
        assert max(check_order(lowered).in_flight) <= peak
        by_time = by_virtual_times(order, barriers, EQUAL_COSTS) if barriers else order
        assert max(check_order(by_time).in_flight) == peak


@settings(max_examples=120, deadline=None)
@given(
    devices=st.integers(1, 5),
    per_device=st.integers(1, 3),
    v_shape=st.booleans(),
    microbatches=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    barriers=st.sampled_from([1, 2]),
    split=st.booleans(),
    equal=st.booleans(),
    eager=st.floats(0, 1),
)
def test_any_sound_order_stays_sound(
    *,
    devices: int,
    per_device: int,
    v_shape: bool,
    microbatches: int,
    seed: int,
    barriers: int,
    split: bool,
    equal: bool,
    eager: float,
) -> None:
    placement = Placement.v_shape(devices) if v_shape else Placement.looped(devices, per_device)
    order = random_order(seed, placement, microbatches, split=split, eager=eager)
    costs = EQUAL_COSTS if equal else random_costs(seed, placement)
    lowered = add_vocabulary(order, barriers, costs)
    for result in (lowered, forward_only(lowered)):
        report = check_program(add_communication(result, costs))
        assert report.ok, report.faults[0]
    limits = peak_limits(order, barriers)
    assert all(held <= limit for held, limit in zip(check_order(lowered).in_flight, limits, strict=True))
    by_time = by_virtual_times(order, barriers, costs)
    assert check_order(by_time).ok
    sorted_span, span = time_order(by_time, costs).span, time_order(lowered, costs).span
    fits = all(held <= limit for held, limit in zip(check_order(by_time).in_flight, limits, strict=True))
    assert not fits or span <= sorted_span * (1 + 1e-6)
    for device in range(devices):  # In the sorted order, what did not move keeps its order, and so does what did.
        for moved in (True, False):
            before, after = (
                [
                    item
                    for item in here.passes(device)
                    if item.kind not in VOCABULARY_KINDS and (item.kind != "F") == moved
                ]
                for here in (order, by_time)
            )
            assert before == after
    assert len({tuple(i for i in by_time.passes(d) if i.kind in VOCABULARY_KINDS) for d in range(devices)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1",
        # The vocabulary passes go between the parts.
        "(0F0;0B0)OVERLAP_F_B,(0F1;0I1)OVERLAP_F_B,0W1",
        "0F0,0B0\n1F0,(2F0;2B0)OVERLAP_F_B,1B0",
        "1F0,1B0\n0F0,0B0\n(2F0;2I0;2W0)OVERLAP_F_B",
    ],
)
@pytest.mark.parametrize("costs", [EQUAL_COSTS, Costs(F=1, B=0, I=0, W=1, S=0, T=0, E=0, G=0, p2p=3)])
def test_passes_run_as_one_are_taken_apart(text: str, costs: Costs) -> None:
    base = Order.from_csv(text)
    if costs is not EQUAL_COSTS:
        costs = replace(costs, F=(2.0, 2.0, 0.0)[-base.placement.stages :])
    for order in (add_vocabulary(base, 1, costs), add_vocabulary(base, 2, costs), interlace(base, costs)):
        assert check_order(order).ok
        assert not any(item.parts for device in range(order.devices) for item in order.passes(device))


@pytest.mark.parametrize(
    ("text", "barriers", "message"),
    [
        ("0F0,0B0", 0, "barriers must be 1 .* or 2 .*, not 0"),
        ("0F0,0B0", 3, "barriers must be 1 .* or 2 .*, not 3"),
        ("E0,0F0,S0,C0,T0,0B0,G0", 1, "the order has vocabulary passes already, with 1 barrier"),
        ("0F0", 2, "barriers must be 1, as for every evaluation, not 2"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD", 1, "cannot be added between UNSHARD"),
    ],
)
def test_what_cannot_be_lowered(text: str, barriers: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_vocabulary(Order.from_csv(text), barriers)


def test_an_order_that_takes_no_time_has_no_interval() -> None:
    with pytest.raises(InputError, match="F and B of at least one stage must be above 0"):
        add_vocabulary(generate("1f1b", 2, 2), 1, Costs(F=0, B=0))
