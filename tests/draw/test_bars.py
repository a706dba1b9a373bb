"""Stacked bars of memory: lengths in proportion, every term told, wrong input refused."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from evenpipe.draw import Bars, bars_svg, bars_text
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


def rectangles(text: str) -> list[tuple[float, float, float, str]]:
    """x, y, width and colour of every rectangle but the background."""
    root = ElementTree.fromstring(text)
    found = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("x") is not None]
    return [(float(one.get("x")), float(one.get("y")), float(one.get("width")), one.get("fill")) for one in found]


def test_lengths_are_in_proportion_and_terms_keep_their_colours() -> None:
    text = bars_svg([FIRST_LAST, VOCAB_2], title="Memory", limit=40 * GIB)
    bars = [one for one in rectangles(text) if one[2] != 13]  # 13: the legend's
    rows: dict[float, list[tuple[float, float, float, str]]] = {}
    for one in bars:
        rows.setdefault(one[1], []).append(one)
    widths = [[one[2] for one in row] for row in rows.values()]
    unit = widths[0][0] / 10
    expected = [[10, 20], [15, 5, 5], [12, 16, 2], [12, 16, 2]]
    assert [[width / unit for width in row] for row in widths] == [pytest.approx(row, rel=1e-3) for row in expected]
    for row in rows.values():
        for before, behind in pairwise(row):
            assert behind[0] == pytest.approx(before[0] + before[2], abs=0.02)
    colours = [[one[3] for one in row] for row in rows.values()]
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


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "there is no device"),
        ([Bars("", ())], "there is no device"),
        ([Bars("", ({"a": 1.0},) * 65)], "more than 64 devices"),
        ([Bars("", ({f"term {number}": 1.0 for number in range(12)},))], "memory of 12 terms"),
    ],
)
def test_what_cannot_be_drawn(groups: list[Bars], message: str) -> None:
    for draw in (bars_svg, bars_text):
        with pytest.raises(InputError, match=message):
            draw(groups)
