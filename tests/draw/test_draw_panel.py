"""The drawing model: order and curves of a panel, columns of crowded rows, and how figures are written."""

from __future__ import annotations

from drawn_timelines import timeline, two_devices

from evenpipe.draw.columns import cut, mean_colour
from evenpipe.draw.figures import Scale, bytes_text, number_text, ticks
from evenpipe.draw.panel import Panel, panels_of


def test_panels_keep_their_order_and_measured_rows_are_put_in_order() -> None:
    assert [panel.name for panel in panels_of({"b": two_devices(), "a": two_devices()})] == ["b", "a"]
    panel = Panel("", timeline("0B0 8 9, 0F0 5 6", "1F0 6.5 7"))
    assert [str(event.item) for event in panel.rows[0]] == ["0F0", "0B0"]
    assert (panel.origin, panel.length) == (5.0, 4.0)  # from the first start to the last end


def test_a_curve_counts_activations_from_forward_to_release_or_bytes_where_they_are_known() -> None:
    panel = Panel("", timeline("0F0 0 1, 0F1 1 2, 0I0 2 3, 0W0 4 5, 0F2 5 6, 0B1 6 8, 0B2 8 9"))
    # At 5 one is released in the moment in which the next one begins.
    assert panel.curve(0) == [(0, 1), (1, 2), (5, 2), (8, 1), (9, 0)]
    panel = Panel("", two_devices())
    assert panel.knows_bytes and panel.curve(1) == [(3.0, 2048.0), (8.0, 0.0)]


def test_columns_hold_the_pieces_of_events_and_mean_colours_weigh_by_time() -> None:
    panel = Panel("", timeline("0F0 0 1.5, 0B0 1.5 4, S0 4 4"))
    pieces = cut(panel.rows[0], 0.0, 1.0, 5)
    assert [[(str(piece.event.item), piece.start, piece.end) for piece in column] for column in pieces] == [
        [("0F0", 0.0, 1.0)],
        [("0F0", 0.0, 0.5), ("0B0", 0.5, 1.0)],
        [("0B0", 0.0, 1.0)],
        [("0B0", 0.0, 1.0)],
        [],
    ]
    panel = Panel("", timeline("0F0 0 1"))
    (column,) = cut(panel.rows[0], 0.0, 2.0, 1)
    assert mean_colour(panel, column, "#000000") == "#1f386a"  # half of #3e70d4
    assert mean_colour(panel, column, None) == "#3e70d4"
    assert mean_colour(panel, column, None, 0.4, 1.0) is None  # mostly idle


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
    assert [text for _, text in ticks(162, Scale(), 8)] == ["0", "50", "100", "150"]
    assert [text for _, text in ticks(0.0314, Scale(1.0), 4)] == ["0 s", "10 ms", "20 ms", "30 ms"]
    assert ticks(0, Scale(), 8) == [(0.0, "0")]
