"""Orders that are known: small ones in full, tables of the papers, torch's own, and options that no schedule takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from text_tables import order_of
from torch_orders import Size, file_of_torch

from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, SCHEDULES, Costs, Order, Placement, check_order, generate, time_order

WHOLE = [
    # schedule, devices, microbatches, rows
    ("gpipe", 2, 3, "0F0 0F1 0F2 0B0 0B1 0B2|1F0 1F1 1F2 1B0 1B1 1B2"),
    ("1f1b", 2, 3, "0F0 0F1 0B0 0F2 0B1 0B2|1F0 1B0 1F1 1B1 1F2 1B2"),
    ("1f1b", 3, 1, "0F0 0B0|1F0 1B0|2F0 2B0"),
    ("zb-h1", 2, 3, "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2|1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"),
    ("zb-h2", 2, 3, "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2|1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"),
    (
        *("interleaved", 2, 4),
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3|"
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ),
    ("looped-bfs", 2, 2, "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1|1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
    (*("gis", 2, 2), "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1|1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1"),
    (
        *("dualpipe-v", 2, 5),  # as published
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B (0F4;3B2)OVERLAP_F_B "
        "(3F3;0B1)OVERLAP_F_B 3B3 (3F4;0B2)OVERLAP_F_B 3B4 0I3 0W3 0I4 0W4|"
        "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B "
        "(1F4;2B2)OVERLAP_F_B (2F4;1B2)OVERLAP_F_B 2B3 1B3 2I4 1I4 2W4 1W4",
    ),
]


def test_small_orders_in_full() -> None:
    for name, devices, microbatches, rows in WHOLE:
        assert generate(name, devices, microbatches) == order_of(rows), name


def test_options_that_make_one_schedule_another() -> None:
    for name, usual in (("interleaved", "1f1b"), ("looped-bfs", "gpipe")):
        assert generate(name, 4, 6, stages_per_device=1) == generate(usual, 4, 6)
    whole = generate("dualpipe-v", 3, 8).to_csv()
    flat = whole.replace("(", "").replace(")OVERLAP_F_B", "").replace(";", ",")
    assert generate("dualpipe-v", 3, 8, overlap=False).to_csv() == flat != whole
    assert generate("gis", 4, 6, group_size=10**12) == generate("gis", 4, 6, group_size=100), "as if no group were full"


def test_placements() -> None:
    in_a_v = {"zbv", "v-half", "v-min", "v-budget", "dualpipe-v"}
    looped = {"interleaved", "looped-bfs", "gis", "gis-h", "po-h", "po-f"}
    for name in SCHEDULES:
        for devices in (1, 2, 5):
            usual = Placement.v_shape(devices) if name in in_a_v else Placement.linear(devices)
            expected = Placement.looped(devices, 2) if name in looped else usual
            assert generate(name, devices, 7).placement == expected, name
            if name in looped:
                assert generate(name, devices, 7, stages_per_device=3).placement == Placement.looped(devices, 3)


ONE, FULL = {"group_size": 1}, {"squeeze": False}
FIGURES = [
    # Bubble and peak of the fullest device at F = I = W = 1, B = 2.
    *[("zb-h1", 4, 8, {}, 3, 4), ("zb-h1", 8, 32, {}, 7, 8), ("zb-h2", 4, 8, {}, 0, 7), ("zb-h2", 8, 32, {}, 0, 15)],
    *[("1f1b", 4, 8, {}, 9, 4), ("interleaved", 4, 8, {}, 9, 11), ("interleaved", 8, 32, {}, 21, 23)],
    # Small groups save memory and cost bubble.
    *[("interleaved", 8, 15, {}, 21, 30), ("interleaved", 8, 15, {"group_size": 8}, 22, 22)],
    ("interleaved", 8, 15, {"group_size": 15}, 21, 30),
    *[("gis", 4, 8, {}, 6, 8), ("gis-h", 4, 8, {}, 8, 6), ("gis", 8, 32, {}, 14, 16), ("gis-h", 8, 32, {}, 18, 12)],
    *[("gis-h", 8, 32, {"stages_per_device": v}, bubble, peak) for v, bubble, peak in ((3, 22, 16), (4, 26, 20))],
    ("gis-h", 8, 32, {"stages_per_device": 8}, 42, 36),
    ("gis", 8, 32, {"group_size": 5}, 21, 13),  # 5 does not divide 32: 4 more than the closed form
    *[("gis", 8, 32, ONE, 23, 13), ("gis", 4, 16, ONE, 9, 7), ("gis", 16, 64, ONE, 51, 25)],
    ("gis", 8, 32, {**ONE, "stages_per_device": 3}, 34, 16),
    ("gis", 8, 32, {**ONE, "stages_per_device": 4}, 41, 23),
    ("gis", 8, 32, {**ONE, "stages_per_device": 8}, 87, 39),
    ("gis", 4, 16, {**ONE, "stages_per_device": 3}, 14, 8),
    *[("zbv", 4, 8, {}, 0, 8), ("zbv", 8, 32, {}, 0, 16), ("zbv", 4, 4, {}, 6, 8), ("v-budget", 4, 12, {}, 0, 8)],
    *[("v-half", 4, 8, {}, 5, 6), ("v-half", 8, 32, {}, 17, 10), ("v-min", 4, 8, {}, 11, 4)],
    ("v-min", 8, 32, {}, 27, 8),
    # few devices
    *[("v-half", 1, 4, {}, 0, 2), ("v-half", 2, 8, {}, 1, 4), ("v-half", 3, 8, {}, 5, 4)],
    *[("v-min", 1, 4, {}, 0, 2), ("v-min", 2, 8, {}, 3, 4), ("v-min", 3, 8, {}, 5, 4)],
    # few microbatches
    *[("v-half", 8, m, {}, bubble, peak) for m, bubble, peak in ((1, 27, 2), (2, 23, 4), (4, 15, 8), (8, 19, 10))],
    *[("v-min", 8, 1, {}, 27, 2), ("v-min", 8, 4, {}, 15, 8), ("v-min", 8, 8, {}, 27, 8)],
    # repeated blocks that are not squeezed
    *[("v-half", 8, m, FULL, 26, 10) for m in (32, 64)],
    *[("v-min", 8, m, FULL, 27, 8) for m in (32, 64)],
]


def test_figures_at_equal_times() -> None:
    wrong = []
    for name, devices, microbatches, options, *expected in FIGURES:
        timeline = time_order(generate(name, devices, microbatches, **options), EQUAL_COSTS)
        if (figures := [timeline.bubble, max(timeline.peak_in_flight)]) != expected:
            wrong.append((name, devices, microbatches, options, figures))
    assert not wrong


PAPER, ALIKE = (10.4, 10.2, 7.7), (3, 4, 2)
UNEQUAL = [
    # F, I and W, and the bubbles of 16, 32 and 64 microbatches on 8 devices
    ("v-min", ALIKE, (183, 279, 471)),
    ("v-min", PAPER, (365.1, 457.9, 643.5)),
    ("v-half", ALIKE, (81, 81, 81)),
    ("v-half", PAPER, (200.3, 200.3, 200.3)),
    ("v-half", (1, 1.4, 1), (25.4, 25.4, 25.4)),  # W + 2 F >= 2 I: constant
    ("v-half", (1, 1.6, 1), (31.4, 34.6, 41.0)),  # just outside: grows
    ("v-half", (2, 1, 0.5), (53.5, 77.5, 125.5)),
    ("zbv", ALIKE, (28, 28, 28)),
]


@pytest.mark.parametrize(("name", "times", "bubbles"), UNEQUAL)
def test_bubbles_of_unequal_passes(name: str, times: tuple[float, ...], bubbles: tuple[float, ...]) -> None:
    costs = Costs(**dict(zip("FIW", times, strict=True)))
    found = [time_order(generate(name, 8, microbatches), costs).bubble for microbatches in (16, 32, 64)]
    assert found == pytest.approx(bubbles)


# Stages per device, microbatches and devices of test_pipeline_order in pytorch's test_schedule.py.
TORCH_INTERLEAVED = [
    *[(2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 32, 4)],
    *[(4, 64, 4), (4, 16, 16), (4, 32, 32), (4, 128, 64), (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5)],
    *[(2, 3, 4), (2, 10, 4), (2, 15, 4)],
]


def test_no_longer_and_no_larger_than_the_orders_of_torch(tmp_path: Path) -> None:
    zbv = [("zbv", "ZBVZeroBubble", Size(d, 2, m)) for d in (1, 2, 3, 4, 8) for m in (1, 3, 4, 8, 16)]
    interleaved = [("interleaved", "Interleaved1F1B", Size(d, v, m)) for v, m, d in TORCH_INTERLEAVED]
    for name, in_torch, size in zbv + interleaved:
        options = {} if name == "zbv" else {"stages_per_device": size.stages_per_device}
        order = generate(name, size.devices, size.microbatches, **options)
        text = file_of_torch(in_torch, size, tmp_path, "compute_only")
        orders = order, Order.from_csv(text, placement=order.placement)
        assert all(check_order(order).ok for order in orders)
        ours, theirs = (time_order(order, EQUAL_COSTS) for order in orders)
        assert ours.span <= theirs.span and ours.makespan <= theirs.makespan, (name, size)
        peaks = zip(ours.peak_in_flight, theirs.peak_in_flight, strict=True)
        assert all(our <= their for our, their in peaks), (name, size)


AT_LEAST_1 = "it must be a whole number of at least 1"
FINITE = "it must be a finite number of at least 1, in stage activations"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("interleaved", {"group_size": 3}, "group_size is 3; it must be at least 4, the number of devices"),
    ("looped-bfs", {"stages_per_device": 0}, f"stages_per_device is 0; {AT_LEAST_1}"),
    ("gis", {"group_size": 0}, f"group_size is 0; {AT_LEAST_1}"),
    ("gis", {"group_size": 2.5}, f"group_size is 2.5; {AT_LEAST_1}"),
    ("gis", {"stages_per_device": 0}, f"stages_per_device is 0; {AT_LEAST_1}"),
    ("gis-h", {"stages_per_device": -1}, f"stages_per_device is -1; {AT_LEAST_1}"),
    ("gis-h", {"group_size": 4}, "schedule 'gis-h' has no option 'group_size'; its options: stages_per_device"),
    ("zb-auto", {"max_in_flight": 0.5}, f"max_in_flight is 0.5; {FINITE}"),
    (
        "zb-auto",
        {"max_in_flight": [4, 4, 0.9, 4]},
        "0.9; it must be a finite number of at least 1, in stage activations",
    ),
    ("zb-auto", {"max_in_flight": [4, 4]}, "max_in_flight has 2 numbers for 4 devices"),
    ("zb-auto", {"max_in_flight": float("inf")}, "max_in_flight is inf; it must be a finite number"),
    ("zb-auto", {"weight_share": "1"}, 'weight_share is "1"; it must be a number from 0 to 1'),
    ("zb-auto", {"weight_share": 1.5}, "weight_share is 1.5; it must be a number from 0 to 1"),
    ("zb-auto", {"costs": Costs(F=1, B=2)}, "costs.I is missing; a split backward needs F, I and W"),
    ("zb-auto", {"costs": Costs(F=[1, 2], I=1, W=1)}, "costs.F has 2 numbers for 4 stages"),
    (
        "v-budget",
        {"max_in_flight": 3},
        "max_in_flight is 3, but a V-schedule on 4 devices needs 4 stage activations on each",
    ),
    ("v-budget", {"max_in_flight": [8, 8, 8, 3]}, "needs 4 stage activations on each"),
    ("v-budget", {"max_in_flight": [10, 10]}, "max_in_flight has 2 numbers for 4 devices"),
    ("v-budget", {"max_in_flight": -1}, "max_in_flight is -1; it must be a finite number above 0"),
    ("v-budget", {"costs": Costs(F=1, B=2)}, "costs.I is missing; a V-schedule needs F, I and W"),
]


def test_options_that_no_schedule_takes() -> None:
    for name, options, message in REFUSED:
        with pytest.raises(InputError) as error:
            generate(name, 4, 8, **options)
        assert message in str(error.value)
