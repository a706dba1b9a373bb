"""The drawing model: panels, lanes, curves, columns, and how figures are written."""

from __future__ import annotations

from itertools import pairwise

import pytest
from drawn_timelines import EMPTY, timeline, two_devices
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.draw.columns import cut, mean_colour
from evenpipe.draw.figures import Scale, bytes_text, figures, number_text, round_step, ticks
from evenpipe.draw.panel import Panel, lanes, panels_of
from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, Event, Kind, Pass, plan_order, time_order


def test_one_timeline_or_several_by_name() -> None:
    assert [panel.name for panel in panels_of(two_devices())] == [""]
    assert [panel.name for panel in panels_of({"b": two_devices(), "a": two_devices()})] == ["b", "a"]
    with pytest.raises(InputError, match="no timeline"):
        panels_of({})


def test_times_count_from_the_first_event_to_the_last_end() -> None:
    panel = Panel("", timeline("0F0 5 6, 0B0 8 9", "1F0 6.5 7"))
    assert (panel.origin, panel.length) == (5.0, 4.0)


def test_measured_rows_are_put_in_order() -> None:
    panel = Panel("", timeline("0B0 5 7, 0F0 1 2"))
    assert [str(event.item) for event in panel.rows[0]] == ["0F0", "0B0"]


def test_a_curve_counts_activations_from_forward_to_release() -> None:
    panel = Panel("", timeline("0F0 0 1, 0F1 1 2, 0I0 2 3, 0W0 4 5, 0F2 5 6, 0B1 6 8, 0B2 8 9"))
    # At 5 one is released in the moment in which the next one begins.
    assert panel.curve(0) == [(0, 1), (1, 2), (5, 2), (8, 1), (9, 0)]


def test_a_curve_is_in_bytes_where_they_are_known() -> None:
    panel = Panel("", two_devices())
    assert panel.knows_bytes
    assert panel.curve(1) == [(3.0, 2048.0), (8.0, 0.0)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_top_of_a_curve_is_the_peak_in_flight(schedule: str) -> None:
    result = time_order(plan_order(schedule, 4, 6, "vocab-2"), EQUAL_COSTS)
    panel = Panel("", result)
    tops = tuple(max(value for _, value in panel.curve(device)) for device in range(4))
    assert tops == result.peak_in_flight


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=30))
def test_events_of_one_lane_do_not_overlap_and_lanes_are_few(spans: list[tuple[int, int]]) -> None:
    events = [
        Event(0, Pass(Kind.F, 0, number), float(start), float(start + length))
        for number, (start, length) in enumerate(sorted(spans))
    ]
    chosen = lanes(events)
    for lane in set(chosen):
        row = [event for event, number in zip(events, chosen) if number == lane]
        assert all(a.end <= b.start for a, b in pairwise(row))
    at_once = [1 + sum(a.end > b.start for a in events[:number]) for number, b in enumerate(events)]
    assert len(set(chosen)) == max(at_once, default=0)


def test_columns_hold_the_pieces_of_events() -> None:
    panel = Panel("", timeline("0F0 0 1.5, 0B0 1.5 4, S0 4 4"))
    pieces = cut(panel.rows[0], 0.0, 1.0, 5)
    shown = [[(str(piece.event.item), piece.start, piece.end) for piece in column] for column in pieces]
    assert shown == [
        [("0F0", 0.0, 1.0)],
        [("0F0", 0.0, 0.5), ("0B0", 0.5, 1.0)],
        [("0B0", 0.0, 1.0)],
        [("0B0", 0.0, 1.0)],
        [],
    ]


def test_mean_colours_weigh_by_time() -> None:
    panel = Panel("", timeline("0F0 0 1"))
    (column,) = cut(panel.rows[0], 0.0, 2.0, 1)
    assert mean_colour(panel, column, "#000000") == "#1f386a"  # half of #3e70d4
    assert mean_colour(panel, column, None) == "#3e70d4"
    assert mean_colour(panel, column, None, 0.4, 1.0) is None  # mostly idle
    assert mean_colour(panel, [], "#000000") is None


def test_numbers_times_and_bytes_as_text() -> None:
    numbers = {
        0: "0",
        162: "162",
        12870: "12870",
        1.25: "1.25",
        2 / 3: "0.6667",
        2.5e-5: "0.000025",
        1.5e-12: "1.5e-12",
    }
    assert {value: number_text(value) for value in numbers} == numbers
    times = {(None, 12.5): "12.5", (1e-3, 12.5): "12.5 ms", (1e-6, 12500): "12.5 ms"}
    times |= {(1.0, 90): "90 s", (1e-6, 0.5): "500 ns", (1.0, 0): "0 s"}
    assert {(unit, time): Scale(unit).text(time) for unit, time in times} == times
    amounts = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 3 * 2**40: "3 TiB"}
    assert {value: bytes_text(value) for value in amounts} == amounts


def test_figures_of_a_step() -> None:
    panel = Panel("", timeline("0F0 0 1, 0B0 4 6", "1F0 1 2, 1B0 2 4"))
    shown = {figure.name: figure.text for figure in figures(panel, Scale())}
    assert shown == {
        "step": "6",
        "busy": "50.0 %",
        "span": "6",
        "bubble of the slowest device": "50.0 %",
        "peak": "1 in flight",
    }


def test_empty_timelines_have_figures() -> None:
    for empty in EMPTY.values():
        shown = {figure.name: figure.text for figure in figures(Panel("", empty), Scale())}
        assert shown.get("step", "0") == "0"


def test_marks_of_the_axis_are_round() -> None:
    assert [text for _, text in ticks(162, Scale(), 8)] == ["0", "50", "100", "150"]
    assert [text for _, text in ticks(0.0314, Scale(1.0), 4)] == ["0 s", "10 ms", "20 ms", "30 ms"]
    assert ticks(0, Scale(), 8) == [(0.0, "0")]


@given(st.floats(1e-9, 1e9))
def test_steps_of_the_axis(step: float) -> None:
    chosen = round_step(step)
    assert step * (1 - 1e-6) <= chosen <= 2.5 * step * (1 + 1e-6)
