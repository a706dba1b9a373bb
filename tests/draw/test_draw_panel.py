"""The drawing model: order and curves of a panel, columns of crowded rows, how figures are written, and colours."""

from __future__ import annotations

import math
from itertools import combinations, product

from drawn_timelines import timeline, two_devices

from evenpipe.draw.columns import cut, mean_colour
from evenpipe.draw.figures import Scale, bytes_text, number_text, ticks
from evenpipe.draw.kinds import IDLE, STYLES, channels, colours_of, for_dark, ink_on, luminance
from evenpipe.draw.panel import Panel, panels_of
from evenpipe.schedule import Kind, Pass, TransferKind


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


# --- colours ----------------------------------------------------------------------------------------------------------

# Linear RGB as seen without one kind of cone: Machado, Oliveira, Fernandes (2009), severity 1.0.
VISION = {
    "trichromacy": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
IN_ONE_ROW = [Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.C, Kind.T, Kind.E, Kind.G, Kind.R]


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    """A colour in OKLab (Ottosson, 2020) as a reader with this vision sees it."""
    linear = [value / 255 for value in channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in linear]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear)))) for row in VISION[vision])
    long = math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue)
    middle = math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue)
    short = math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def distance(one: str, other: str, vision: str = "trichromacy") -> float:
    """0.06 is about three just noticeable differences."""
    return math.dist(seen(one, vision), seen(other, vision))


def contrast(a: str, b: str) -> float:
    """WCAG 2.2: 4.5 and more is readable for small text."""
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_kinds_in_one_row_stay_apart() -> None:
    colours = {kind.value: STYLES[kind].colour for kind in IN_ONE_ROW} | {"idle": IDLE}
    weight = colours["W"]
    for vision in VISION:
        close = [pair for pair in combinations(colours, 2) if distance(*map(colours.get, pair), vision) < 0.06]
        assert not close, vision
        assert all(distance(weight, colours[other], vision) > 0.15 for other in "SFI"), "told at a glance"
        dark = [distance(for_dark(weight), for_dark(STYLES[k].colour), vision) for k in IN_ONE_ROW if k is not Kind.W]
        assert min(dark) >= 0.06, vision


def test_stages_and_slices_differ_in_shade_from_light_to_dark() -> None:
    for kind, page, (held, slices) in product("FBIWST", (str, for_dark), [(1, 2), (1, 4), (1, 16), (2, 4)]):
        stages = (0, 7)[:held] if kind in "FBIW" else (None,)
        passes = [Pass(Kind(kind), stage, 3, part) for stage, part in product(stages, range(slices))]
        shades = [page(colours_of(item, (0, 7)[:held], slices)[0]) for item in passes]
        assert len(set(shades)) == len(shades)
        assert shades == sorted(shades, key=luminance, reverse=True)
        assert distance(shades[0], shades[slices - 1]) > 0.04
        assert held == 1 or kind not in "FBIW" or all(distance(shades[0], shades[-1], v) > 0.1 for v in VISION)
        assert all(contrast(shade, ink_on(shade)) >= 4.5 for shade in shades)
    assert len({colours_of(Pass(Kind.F, 0, 0, part), (0, 1), 64) for part in range(64)}) == 8, "many share shades"
    assert colours_of(Pass(Kind.UNSHARD, 0, None), (0,), 4) == (STYLES[Kind.UNSHARD].colour,), "of replicas: no slices"


def test_every_kind_has_a_colour_in_which_numbers_can_be_read() -> None:
    assert set(STYLES) == {*Kind, *TransferKind}
    for kind, stages in product(STYLES, (1, 2, 4)):
        for stage in range(stages):
            item = Pass(kind, stage, 0) if isinstance(kind, Kind) else None
            colours = colours_of(item, tuple(range(stages))) if item else (STYLES[kind].colour,)
            for colour in (*colours, *map(for_dark, colours)):
                assert contrast(colour, ink_on(colour)) >= 4.5, colour
