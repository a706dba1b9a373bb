"""Orders, programs and timelines in a notebook: short words, and a picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from evenpipe.schedule import EQUAL_COSTS, Order, Timeline, generate, plan_program, time_order
from evenpipe.schedule.picture import MOST_EVENTS

ORDER, PROGRAM = plan_program("1f1b", 2, 3, "first-last")
TIMELINE = time_order(ORDER, EQUAL_COSTS)
STUCK = Order.from_csv("0F0,0B0\n1B0,1F0")
SHORT = {
    "<Order: 2 devices, 2 stages, 3 microbatches, 12 passes>": ORDER,
    "<Program: 2 devices, 2 stages, 3 microbatches, 12 passes, 12 transfers>": PROGRAM,
    "<Timeline: 2 devices, step 12, busy 75.0 %>": TIMELINE,
    "<Timeline: 2 devices, no events>": Timeline(((), ())),
    "<Timeline: 0 devices, no events>": Timeline(()),
    "<Order: 1 device, 1 stage, 1 microbatch, 2 passes>": Order.from_csv("0F0,,0B0"),
}


def test_a_repr_is_a_line() -> None:
    assert {words: repr(shown) for words, shown in SHORT.items()} == {words: words for words in SHORT}


@pytest.mark.parametrize("shown", [ORDER, PROGRAM, TIMELINE], ids=lambda shown: type(shown).__name__)
def test_a_notebook_shows_the_picture_under_the_words(shown: Order) -> None:
    html = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
    words, picture = html
    assert (words.text or "").startswith(repr(shown))
    assert picture.tag.endswith("svg")
    assert "device 1" in "".join(picture.itertext())


def test_what_cannot_complete_says_so_in_place_of_a_picture() -> None:
    html = STUCK._repr_html_()
    assert html.startswith("<pre>&lt;Order: 2 devices, 2 stages, 1 microbatch, 4 passes&gt;\n")
    assert "cannot complete" in html
    assert "<svg" not in html


def test_what_is_too_large_or_empty_has_words_only() -> None:
    assert Timeline(((), ()))._repr_html_() == "<pre>&lt;Timeline: 2 devices, no events&gt;</pre>"
    order = generate("gpipe", 1, MOST_EVENTS // 2 + 1)
    assert order._repr_html_() == f"<pre>{repr(order).replace('<', '&lt;').replace('>', '&gt;')}</pre>"
