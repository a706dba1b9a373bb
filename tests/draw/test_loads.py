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
    row = [(one.get("fill"), float(one.get("width", "0"))) for one in rects if one.get("height") == "14"]
    whole = sum(width for _, width in row)
    found = [(colour, round(10 * width / whole)) for colour, width in row]
    assert found == [
        (COLOURS["0.8 to 1.25"], 2),
        (COLOURS["no token"], 1),
        (COLOURS["more than 2"], 1),
        (COLOURS["less than half"], 1),
        (COLOURS["less than 0.8"], 1),
        (COLOURS["up to 2"], 1),
        (COLOURS["0.8 to 1.25"], 3),
    ]
    assert {"Loads", "layer 3", "most 3.33, least 0.00", *COLOURS} <= set(texts)


def test_layers_may_have_different_numbers_of_experts_or_no_tokens() -> None:
    rects, texts = shapes(loads_svg({"layer 0": [0, 0], "layer 1": [3, 3, 3, 3]}))
    fills = [one.get("fill") for one in rects if one.get("height") == "14"]
    assert fills == [COLOURS["no token"], COLOURS["0.8 to 1.25"]]
    assert {"most 0.00, least 0.00", "most 1.00, least 1.00"} <= set(texts)


def test_without_experts_there_is_nothing_to_draw() -> None:
    with pytest.raises(InputError, match="no experts to draw"):
        loads_svg({})
