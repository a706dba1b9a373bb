"""Draw docs/step.svg, the picture at the top of the README: one training step, first-last above vocab-2.

    python tools/picture.py

Simulated by the event model for 4 devices, 8 microbatches and 2 transformer layers per device, with an output layer
that costs as much as 4 layers. A test draws it again and compares, so it shows what the schedule code does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evenpipe.draw import svg
from evenpipe.schedule import Costs, Event, Kind, Pass, Timeline, plan_order, time_order

DEVICES, MICROBATCHES, LAYERS, HEAD = 4, 8, 2, 4
FORWARD = float(LAYERS)
FILE = Path(__file__).resolve().parent.parent / "docs" / "step.svg"


def first_last() -> Timeline:
    """Return a step whose last device has the output layer in its F and B, drawn as S and T."""
    forward = (FORWARD,) * (DEVICES - 1) + (FORWARD + HEAD,)
    costs = Costs(F=forward, B=tuple(2 * time for time in forward))
    timeline = time_order(plan_order("1f1b", DEVICES, MICROBATCHES, "first-last", costs), costs)
    *others, last = timeline.events
    return replace(timeline, events=(*others, tuple(part for event in last for part in _with_head(event))))


def _with_head(event: Event) -> tuple[Event, Event]:
    """Split a pass of the last stage into its layers and its output layer, which ends F and begins B."""
    assert isinstance(event.item, Pass)
    if event.item.kind is Kind.F:
        middle = event.start + FORWARD
        head = Pass(Kind.S, microbatch=event.item.microbatch)
        return event._replace(end=middle), event._replace(item=head, start=middle)
    middle = event.start + 2 * HEAD
    head = Pass(Kind.T, microbatch=event.item.microbatch)
    return event._replace(item=head, end=middle), event._replace(start=middle)


def vocab_2() -> Timeline:
    """Return a step in which every device holds a quarter of it."""
    share = HEAD / DEVICES
    costs = Costs(F=FORWARD, B=2 * FORWARD, S=2 * share, C=0.0, T=share, E=0.0, G=0.0)
    return time_order(plan_order("1f1b", DEVICES, MICROBATCHES, "vocab-2", costs), costs)


def draw() -> str:
    """Return the SVG text."""
    steps = {"first-last": first_last(), "vocab-2": vocab_2()}
    return svg(steps, width=960, unit="forwards of one layer", speedup=True)


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
