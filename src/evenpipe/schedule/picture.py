"""Pictures of orders, programs and timelines for notebooks, with the text of their `repr`.

`evenpipe.draw` imports this package, so it is imported here only when a picture is drawn.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import TYPE_CHECKING

from evenpipe.errors import InputError

from .costs import EQUAL_COSTS
from .timing import time_order

if TYPE_CHECKING:
    from .order import Order
    from .timeline import Timeline

MOST_EVENTS = 20_000
"""Most events of a timeline that a notebook draws automatically; use `evenpipe.draw` for larger ones."""


def html_of_order(order: Order, words: str) -> str:
    """The step of `order` at equal costs, below the text `words`; only the text if the order cannot complete or is too
    large."""
    if sum(map(len, order.rows)) > MOST_EVENTS:
        return _text(words)
    try:
        timeline = time_order(order, EQUAL_COSTS)
    except InputError as error:
        return _text(f"{words}\n{error}")
    return html_of_timeline(timeline, f"{words}, with equal costs")


def html_of_timeline(timeline: Timeline, words: str) -> str:
    """The picture of `timeline` below the text `words`; only the text if it is empty or too large."""
    events = sum(map(len, timeline.events))
    if not 0 < events <= MOST_EVENTS:
        return _text(words)
    picture: str = import_module("evenpipe.draw").svg(timeline, width=900)
    return f"{_text(words)}{picture}"


def _text(words: str) -> str:
    return f"<pre>{escape(words)}</pre>"
