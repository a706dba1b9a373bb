"""Draws docs/step.svg, the picture at the top of the README: one training step, first-last above vocab-2.

    python docs/picture.py

Simulated by the event model for 4 devices, 8 microbatches and 2 transformer layers per device, with an output layer
that costs as much as 4 layers. A test draws it again and compares, so it shows what the schedule code does.
"""

from __future__ import annotations

from pathlib import Path

from evenpipe.schedule import Costs, Kind, Pass, Timeline, plan_order, time_order

DEVICES, MICROBATCHES, LAYERS, HEAD = 4, 8, 2, 4
FORWARD = float(LAYERS)
FILE = Path(__file__).with_name("step.svg")

COLOURS = {
    Kind.F: "#4c8dd6",
    Kind.B: "#58a878",
    Kind.S: "#f0a63c",
    Kind.C: "#f0a63c",
    Kind.T: "#e2703a",
    Kind.E: "#b59ad6",
    Kind.G: "#b59ad6",
}
HEAD_COLOUR = "#e2703a"
ROW, GAP, LEFT, TOP, WIDTH = 22, 4, 74, 34, 900


def first_last() -> Timeline:
    """The output layer is a part of the last device's F and B."""
    forward = (FORWARD,) * (DEVICES - 1) + (FORWARD + HEAD,)
    costs = Costs(F=forward, B=tuple(2 * time for time in forward))
    return time_order(plan_order("1f1b", DEVICES, MICROBATCHES, "first-last", costs), costs)


def vocab_2() -> Timeline:
    """Every device holds a quarter of it."""
    share = HEAD / DEVICES
    costs = Costs(F=FORWARD, B=2 * FORWARD, S=2 * share, C=0.0, T=share, E=0.0, G=0.0)
    return time_order(plan_order("1f1b", DEVICES, MICROBATCHES, "vocab-2", costs), costs)


def draw() -> str:
    """The SVG text."""
    timelines = [("first-last", first_last()), ("vocab-2", vocab_2())]
    scale = (WIDTH - LEFT - 10) / max(timeline.makespan for _, timeline in timelines)
    height = len(timelines) * (TOP + DEVICES * (ROW + GAP)) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    top = 0
    for name, timeline in timelines:
        busy = sum(timeline.busy) / (DEVICES * timeline.makespan)
        title = f"{name}: {timeline.makespan:.0f} units of time, devices busy {100 * busy:.0f} %"
        lines.append(f'<text x="{LEFT}" y="{top + 22}" font-size="14" fill="#222222">{title}</text>')
        for device, row in enumerate(timeline.events):
            y = top + TOP + device * (ROW + GAP)
            end = LEFT + timeline.makespan * scale
            lines.append(f'<text x="8" y="{y + 15}" fill="#444444">device {device}</text>')
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{ROW}" fill="#eeeeee"/>')
            for event in row:
                assert isinstance(event.item, Pass)
                lines += _block(event.item, LEFT + event.start * scale, (event.end - event.start) * scale, y)
                if name == "first-last" and device == DEVICES - 1:
                    lines += _head(event.item, LEFT + event.start * scale, (event.end - event.start) * scale, y)
        top += TOP + DEVICES * (ROW + GAP)
    legend = [("F", "forward"), ("B", "backward"), ("S", "output layer, first half"), ("T", "second half")]
    x = LEFT
    for kind, text in legend:
        lines.append(f'<rect x="{x}" y="{top + 12}" width="14" height="12" fill="{COLOURS[Kind(kind)]}"/>')
        lines.append(f'<text x="{x + 20}" y="{top + 22}" fill="#444444">{kind}: {text}</text>')
        x += 60 + 7 * len(text)
    lines.append(f'<text x="{x}" y="{top + 22}" fill="#444444">in first-last, on the last device only</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _block(item: Pass, x: float, width: float, y: int) -> list[str]:
    if width <= 0:
        return []
    lines = [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[item.kind]}" '
        'stroke="#ffffff" stroke-width="0.7"/>'
    ]
    if width >= 9:
        lines.append(
            f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="#ffffff" font-size="10" text-anchor="middle">'
            f"{item.microbatch}</text>"
        )
    return lines


def _head(item: Pass, x: float, width: float, y: int) -> list[str]:
    """The part of a whole last stage's pass that is the output layer: the end of F, the beginning of B."""
    part = width * HEAD / (FORWARD + HEAD)
    start = x + width - part if item.kind is Kind.F else x
    colour = COLOURS[Kind.S] if item.kind is Kind.F else HEAD_COLOUR
    return [f'<rect x="{start:.1f}" y="{y}" width="{part:.1f}" height="{ROW}" fill="{colour}"/>']


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
