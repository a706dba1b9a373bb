"""Stacked bars of memory, and how busy experts are."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from drawn_timelines import Box, boxes, words

from evenpipe.draw import Bars, bars_svg, bars_text, loads_svg
from evenpipe.draw.loads import SCALE
from evenpipe.errors import InputError

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


def test_in_the_terminal() -> None:
    lines = bars_text([FIRST_LAST], width=60, limit=40 * GIB).splitlines()
    assert lines[0] == "first-last"
    columns = 60 - len("device 0 ") - len(" 30 GiB")
    bar = re.match(r"device 0 (#+)(=+)", lines[1])
    assert bar is not None
    assert (len(bar[1]), len(bar[1]) + len(bar[2])) == (round(columns * 10 / 40), round(columns * 30 / 40))
    assert lines[1].endswith("| 30 GiB")
    assert lines[-1] == "# parameters  = activations  + vocabulary  | 40 GiB of a device"


def test_what_cannot_be_drawn() -> None:
    for groups, message in (
        ([], "there is no device"),
        ([Bars("", ())], "there is no device"),
        ([Bars("", ({"a": 1.0},) * 65)], "more than 64 devices"),
        ([Bars("", ({f"term {number}": 1.0 for number in range(12)},))], "memory of 12 terms"),
    ):
        for draw in (bars_svg, bars_text):
            with pytest.raises(InputError, match=message):
                draw(groups)
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
