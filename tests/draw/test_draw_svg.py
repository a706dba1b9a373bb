"""SVG: well-formed, escaped, the same every time, and what the timeline says; bars of memory, and loads of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from drawn_timelines import EMPTY, SPACE, Box, boxes, tensor_ranks, timeline, two_devices, words

from evenpipe.draw import Bars, bars_svg, loads_svg, svg
from evenpipe.draw.kinds import IDLE, STYLES, luminance
from evenpipe.draw.loads import SCALE
from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Costs, Kind, plan_order, time_order
from evenpipe.simulate import simulate


def test_a_pass_is_a_box_with_its_microbatch() -> None:
    text = svg(timeline("0F3 0 2, 0B3 6 10"), width=500)
    (forward,), (backward,) = boxes(text, STYLES[Kind.F].colour), boxes(text, STYLES[Kind.B].colour)
    (idle,) = boxes(text, IDLE)
    assert forward[2] * 2 == pytest.approx(backward[2], abs=2)
    assert backward[0] - idle[0] == pytest.approx(0.6 * idle[2], abs=1)
    assert words(text).count("3") == 2
    assert "device 0" in words(text)


def test_where_a_device_has_several_stages_a_box_says_which_if_there_is_room() -> None:
    rows = "0F3 0 2, 3F3 2 4, (0F4;3B3)OVERLAP_F_B 4 8, S3 8 10"
    shown = words(svg(timeline(rows), width=600))
    assert {"0F3", "3F3", "0F4", "3B3", "S3"} <= set(shown)
    shown = words(svg(timeline(f"{rows}, 0B3 58 60"), width=600))
    assert "3F3" not in shown and shown.count("3") >= 2
    assert "lighter to darker: from the first to the last stage of a device" in shown
    assert "0F3" not in words(svg(timeline("0F3 0 2", "1F3 2 4"), width=600))  # the device says which


def test_panels_share_one_axis_of_time_and_say_their_figures() -> None:
    both = {"short": timeline("0F0 5 7, 0B0 7 9"), "long": timeline("0F0 0 2, 0B0 6 10")}
    text = svg(both, title="A step", unit_seconds=1e-3)
    short, long = boxes(text, IDLE)
    assert short[0] == long[0] and short[1] < long[1]
    assert short[2] * 2.5 == pytest.approx(long[2], rel=1e-3)
    assert "A step" in words(text)
    assert any("step 10 ms" in line and "bubble of the slowest device 40.0 %" in line for line in words(text))


def test_the_legend_says_what_tensor_ranks_exchange() -> None:
    (legend,) = [text for text in words(svg(tensor_ranks())) if "tensor" in text]
    assert legend == "tensor collectives: 25.0 % of F, 37.5 % of I, 50.0 % of S"
    assert not any("tensor" in text for text in words(svg(two_devices())))


def test_the_axis_has_a_unit() -> None:
    for unit, expected in (
        ({}, "time, in the unit of the costs"),
        ({"unit": "forwards"}, "time, in forwards"),
        ({"unit_seconds": 1.0}, "6 s"),
    ):
        shown = words(svg(timeline("0F0 0 1, 0B0 4 6"), **unit))
        assert expected in shown and any(word.startswith("time, in") for word in shown) == ("unit_seconds" not in unit)


def test_a_shorter_step_says_how_many_times_as_fast_it_is() -> None:
    # The end of the second step, beside 10 of the first one: what stands to its right.
    for end, expected in ((5.5, ["1.8x", "as fast"]), (9.9, []), (20, []), (9, [])):  # alike, longer, no room
        both = {"slow": timeline("0F0 0 2, 0B0 2 10"), "fast": timeline(f"0F0 0 2, 0B0 2 {end}")}
        assert [word for word in words(svg(both, speedup=True)) if "x" in word or word == "as fast"] == expected
        assert "as fast" not in words(svg(both))


def test_readers_who_prefer_it_see_a_dark_picture() -> None:
    (style,) = ET.fromstring(svg(timeline("0F0 0 1, 0I0 1 2, 0W0 2 3"))).iter(f"{SPACE}style")
    query, _, rules = (style.text or "").partition("{")
    assert query == "@media (prefers-color-scheme: dark) "
    found = dict(re.findall(r'rect\[fill="(#\w+)"\] \{ fill: (#\w+) \}', rules))
    assert set(found) == {"#ffffff", IDLE, STYLES[Kind.W].colour}  # those that would not show, or blind
    assert luminance(found["#ffffff"]) < luminance(found[IDLE]) < luminance(found[STYLES[Kind.W].colour])
    for colour, raised in re.findall(r'text\[fill="(#\w+)"\] \{ fill: (#\w+) \}', rules):
        assert luminance(colour) < 0.2 < luminance(raised)


def test_memory_is_an_area_per_device_with_its_peak() -> None:
    text = svg(two_devices(), memory=True)
    assert sum(node.get("fill-opacity") is not None for node in ET.fromstring(text).iter(f"{SPACE}path")) == 2
    assert {"peak", "1 KiB", "2 KiB"} <= set(words(text))
    assert "fill-opacity" not in svg(two_devices())


def test_a_limit_is_a_line_over_each_curve_at_its_height() -> None:
    step = replace(two_devices(), limit=(4096.0, 1536.0))
    text = svg(step, memory=True)
    assert "memory limit: 1.5 KiB, 4 KiB" in words(text)
    paths = [node.get("d", "") for node in ET.fromstring(text).iter(f"{SPACE}path")]
    curves = [re.findall(r"V([\d.]+)", path) for path in paths if path.endswith("Z")]
    lines = [
        float(path[1:].replace("H", " ").split()[1]) for path in paths if re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+", path)
    ]
    for (peak, *_, base), line, amounts in zip(curves, lines[:2], ((1024, 4096), (2048, 1536)), strict=True):
        height, curve = float(base) - line, float(base) - float(peak)
        assert height / curve == pytest.approx(amounts[1] / amounts[0], rel=0.02)
    assert "memory limit" not in svg(step) and "memory limit" not in svg(two_devices(), memory=True)


def test_passes_that_run_as_one_are_drawn_above_each_other() -> None:
    text = svg(timeline("(0F1;0B0)OVERLAP_F_B 0 4"))
    (forward,), (backward,) = boxes(text, STYLES[Kind.F].colour), boxes(text, STYLES[Kind.B].colour)
    assert (forward[0], forward[2]) == (backward[0], backward[2])
    assert forward[1] + forward[3] == backward[1]
    assert {"0", "1"} <= set(words(text))


@pytest.mark.slow
def test_size_is_bounded_by_pixels_not_by_passes() -> None:
    orders = [plan_order("1f1b", 2, microbatches, "vocab-2") for microbatches in (1000, 2000)]
    sizes = [len(svg(time_order(order, EQUAL_COSTS), width=600)) for order in orders]
    assert max(sizes) < 3000 + 2 * 600 * 80  # a rectangle per pixel of each row at most
    assert sizes[1] < 1.6 * sizes[0]


def test_nothing_lies_outside_the_picture_and_kinds_without_duration_leave_no_trace() -> None:
    names = {"a rather long name of a schedule with many options": two_devices(), "b": timeline("0F0 0 30, S0 2 2")}
    text = svg(names, width=300, memory=True)
    assert not any("output layer" in line for line in words(text))
    root = ET.fromstring(text)
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    for node in root.iter(f"{SPACE}rect"):
        x, y, across, down = (float(node.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + across <= width
        assert 0 <= y <= y + down <= height


def test_odd_sizes_are_drawn() -> None:
    many = timeline(*(f"{device}F0 {device} {device + 1}" for device in range(400)))
    for odd in (*EMPTY.values(), timeline("S0 3 3"), many):
        for memory in (False, True):
            assert ET.fromstring(svg(odd, memory=memory)).tag == f"{SPACE}svg"


def test_copies_have_a_lane_of_their_own() -> None:
    """Below the row of their device, with a place in the legend; timelines without any have none."""
    costs = Costs(F=1, B=2, O=0.75, L=0.75)
    kept, moved = (plan_order("1f1b", 4, 8, "first-last", costs, offload=what) for what in ("none", "free"))
    plain, drawn = (svg(simulate(order, costs).timeline) for order in (kept, moved))
    assert "offload to host" not in plain and "offload to host" in drawn and "load from host" in drawn
    copies = sum(item is not None and item.kind in (Kind.O, Kind.L) for row in moved.rows for item in row)
    assert sum(len(boxes(drawn, STYLES[kind].colour)) for kind in (Kind.O, Kind.L)) == copies


# --- bars of memory and loads of experts ------------------------------------------------------------------------------

GIB = 2.0**30
FIRST_LAST = Bars(
    "first-last",
    (
        {"parameters": 10 * GIB, "activations": 20 * GIB, "vocabulary": 0.0},
        {"parameters": 15 * GIB, "activations": 5 * GIB, "vocabulary": 5 * GIB},
    ),
)
VOCAB_2 = Bars("vocab-2", ({"parameters": 12 * GIB, "activations": 16 * GIB, "vocabulary": 2 * GIB},) * 2)


def test_lengths_are_in_proportion_and_terms_keep_their_colours() -> None:
    rows: dict[float, list[Box]] = {}
    for box in boxes(bars_svg([FIRST_LAST, VOCAB_2], title="Memory", limit=40 * GIB)):
        rows.setdefault(box.y, []).append(box)
    widths = [[box.width for box in row] for row in rows.values()]
    unit = widths[0][0] / 10
    expected = [[10, 20], [15, 5, 5], [12, 16, 2], [12, 16, 2]]
    assert [[width / unit for width in row] for row in widths] == [pytest.approx(row, rel=1e-3) for row in expected]
    for row in rows.values():
        for before, behind in pairwise(row):
            assert behind.x == pytest.approx(before.x + before.width, abs=0.02)
    colours = [[box.colour for box in row] for row in rows.values()]
    assert colours[1] == colours[2] == colours[3]
    assert colours[0] == colours[1][:2]


def test_every_figure_is_in_the_text_for_readers_without_eyes() -> None:
    text = bars_svg([FIRST_LAST, VOCAB_2], limit=40 * GIB)
    assert "first-last: device 0 30 GiB, device 1 25 GiB; vocab-2: device 0 30 GiB, device 1 30 GiB" in text
    assert "line: 40 GiB of a device" in text
    for term in ("parameters", "activations", "vocabulary"):
        assert f">{term}</text>" in text


def test_what_cannot_be_drawn() -> None:
    for groups, message in (
        ([], "there is no device"),
        ([Bars("", ())], "there is no device"),
        ([Bars("", ({"a": 1.0},) * 65)], "more than 64 devices"),
        ([Bars("", ({f"term {number}": 1.0 for number in range(12)},))], "memory of 12 terms"),
    ):
        with pytest.raises(InputError, match=message):
            bars_svg(groups)
    with pytest.raises(InputError, match="no experts to draw"):
        loads_svg({})


# --- experts ----------------------------------------------------------------------------------------------------------

COLOURS = {text: colour for _, colour, text in SCALE}


def experts(text: str) -> list[Box]:
    return [box for box in boxes(text) if box.height == 14]


def test_every_expert_has_the_colour_of_its_share() -> None:
    text = loads_svg({"layer 3": [10, 10, 0, 40, 2, 7, 15, 12, 12, 12]}, title="Loads")
    shares = ["0.8 to 1.25"] * 2 + ["no token", "more than 2", "less than half", "less than 0.8", "up to 2"]
    assert [box.colour for box in experts(text)] == [COLOURS[share] for share in shares + ["0.8 to 1.25"] * 3]
    assert {"Loads", "layer 3", "most 3.33, least 0.00", *COLOURS} <= set(words(text))
    # Layers may have different numbers of experts, or no tokens.
    text = loads_svg({"layer 0": [0, 0], "layer 1": [3, 3, 3, 3]})
    assert [box.colour for box in experts(text)] == [COLOURS["no token"]] * 2 + [COLOURS["0.8 to 1.25"]] * 4
    assert {"most 0.00, least 0.00", "most 1.00, least 1.00"} <= set(words(text))


def test_many_experts_of_one_colour_are_one_shape() -> None:
    row = experts(loads_svg({"layer 0": [1] * 200 + [0] * 56}))
    assert [box.colour for box in row] == [COLOURS["up to 2"], COLOURS["no token"]]
    assert row[0].width / row[1].width == pytest.approx(200 / 56, rel=1e-3)
