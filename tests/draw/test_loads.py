"""Pictures of how busy experts are."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from evenpipe.draw import loads_svg
from evenpipe.draw.loads import SCALE
from evenpipe.errors import InputError

NAMESPACE = "{http://www.w3.org/2000/svg}"
COLOURS = {text: colour for _, colour, text in SCALE}


def shapes(text: str) -> tuple[list[ET.Element], list[str]]:
    root = ET.fromstring(text)
    return list(root.iter(f"{NAMESPACE}rect")), [one.text or "" for one in root.iter(f"{NAMESPACE}text")]


def test_every_expert_has_the_colour_of_its_share() -> None:
    rects, texts = shapes(loads_svg({"layer 3": [10, 10, 0, 40, 2, 7, 15, 12, 12, 12]}, title="Loads"))
    found = [one.get("fill") for one in rects if one.get("height") == "14"]
    words = ["0.8 to 1.25"] * 2 + ["no token", "more than 2", "less than half", "less than 0.8", "up to 2"]
    assert found == [COLOURS[word] for word in words + ["0.8 to 1.25"] * 3]
    assert {"Loads", "layer 3", "most 3.33, least 0.00", *COLOURS} <= set(texts)


def test_many_experts_of_one_colour_are_one_shape() -> None:
    rects, _ = shapes(loads_svg({"layer 0": [1] * 200 + [0] * 56}))
    row = [(one.get("fill"), float(one.get("width", "0"))) for one in rects if one.get("height") == "14"]
    assert [colour for colour, _ in row] == [COLOURS["up to 2"], COLOURS["no token"]]
    assert row[0][1] / row[1][1] == pytest.approx(200 / 56, rel=1e-3)


def test_layers_may_have_different_numbers_of_experts_or_no_tokens() -> None:
    rects, texts = shapes(loads_svg({"layer 0": [0, 0], "layer 1": [3, 3, 3, 3]}))
    fills = [one.get("fill") for one in rects if one.get("height") == "14"]
    assert fills == [COLOURS["no token"]] * 2 + [COLOURS["0.8 to 1.25"]] * 4
    assert {"most 0.00, least 0.00", "most 1.00, least 1.00"} <= set(texts)


def test_without_experts_there_is_nothing_to_draw() -> None:
    with pytest.raises(InputError, match="no experts to draw"):
        loads_svg({})
