"""Small timelines for the tests of drawing, and what is in a picture of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from xml.etree import ElementTree

from evenpipe.schedule import Cause, Costs, Event, Pass, Slack, Timeline, Transfer, TransferKind, plan_order, time_order

EMPTY = {"no devices": Timeline(()), "no events": Timeline(((), ()))}


def timeline(*rows: str, **more: object) -> Timeline:
    """Rows of "pass start end", with commas between them: timeline("0F0 0 1, 0B0 5 7", "1F0 1 2")."""
    return Timeline(tuple(_events(device, row) for device, row in enumerate(rows)), **more)  # type: ignore[arg-type]


def _events(device: int, row: str) -> tuple[Event, ...]:
    events = []
    for words in filter(None, row.split(",")):
        text, start, end = words.split()
        events.append(Event(device, Pass.parse(text), float(start), float(end)))
    return tuple(events)


def two_devices() -> Timeline:
    """One microbatch through two devices, with transfers, causes and bytes, as a simulation fills them in."""
    forward = Transfer(TransferKind.RECV_F, 1, 0, members=(0, 1))
    backward = Transfer(TransferKind.RECV_B, 0, 0, members=(1, 0))
    first, second = Pass.parse("0F0"), Pass.parse("1F0")
    last, end = Pass.parse("1B0"), Pass.parse("0B0")
    rows = (
        (Event(0, first, 0.0, 2.0, Cause("start")), Event(0, end, 9.0, 12.0, Cause("transfer", backward, 0))),
        (
            Event(1, second, 3.0, 5.0, Cause("transfer", forward, 1)),
            Event(1, last, 5.0, 8.0, Cause("device", second, 1)),
        ),
    )
    beside = (
        (Event(0, backward, 8.0, 9.0, Cause("transfer", last, 1)),),
        (Event(1, forward, 2.0, 3.0, Cause("transfer", first, 0)),),
    )
    memory = (((0.0, 1024.0), (12.0, 0.0)), ((3.0, 2048.0), (8.0, 0.0)))
    return Timeline(rows, None, beside, memory)


def with_slack(step: Timeline) -> Timeline:
    """`two_devices` whose first pass could end 1 later, until 1F0 starts, and whose last one ends the step."""
    (first, last), other = step.events
    waiting = Slack(1.0, Pass.parse("1F0"), 1)
    return replace(step, events=((first._replace(slack=waiting), last._replace(slack=Slack(0.0))), other))


def tensor_ranks() -> Timeline:
    """A device of several tensor ranks, which exchange rows for a quarter of F and half of S, and not in W."""
    costs = Costs(F=2, I=2, W=1, S=0.4, T=0.4, E=0, G=0, tensor_exchange={"F": 0.5, "I": (0.5, 1.0), "S": 0.2})
    return time_order(plan_order("zb-h1", 2, 2, "vocab-2"), costs)


class Box(NamedTuple):
    """A rectangle of an SVG."""

    x: float
    y: float
    width: float
    height: float
    colour: str


SPACE = "{http://www.w3.org/2000/svg}"
SAMPLE = 13
"""Width and height of the samples in a legend."""


def rectangles(text: str, colour: str | None = None) -> list[Box]:
    """All of a picture, or those of a colour, without the background."""
    found = ElementTree.fromstring(text).iter(f"{SPACE}rect")
    every = [
        Box(*(float(one.get(name, "0")) for name in ("x", "y", "width", "height")), one.get("fill", ""))
        for one in found
        if one.get("x") is not None
    ]
    return [box for box in every if colour in (None, box.colour)]


def boxes(text: str, colour: str | None = None) -> list[Box]:
    """Rectangles without the samples of the legend."""
    return [box for box in rectangles(text, colour) if box[2:4] != (SAMPLE, SAMPLE)]


def words(text: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(text).iter(f"{SPACE}text")]
