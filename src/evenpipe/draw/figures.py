"""Figures of a timeline as text: times, bytes, shares, the line next to every picture, and the marks of its axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .panel import Panel, kinds_in

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Scale:
    """How times are written. unit_seconds: seconds per unit of a timeline; None if not known."""

    unit_seconds: float | None = None

    def text(self, time: float) -> str:
        """A duration with four digits: "162", "1.25", "12.5 ms"."""
        if self.unit_seconds is None:
            return number_text(time)
        seconds = time * self.unit_seconds
        size = abs(seconds)
        factor, unit = next((entry for entry in _UNITS if size >= entry[0]), _UNITS[-1] if size else _UNITS[0])
        return f"{number_text(seconds / factor)} {unit}"


@dataclass(frozen=True, slots=True)
class Figure:
    """name: of the figure. text: its value. note: one sentence that explains it."""

    name: str
    text: str
    note: str


def figures(panel: Panel, scale: Scale) -> list[Figure]:
    """The figures of a timeline; zeros if it has no events."""
    timeline = panel.timeline
    if not panel.devices:
        return [Figure("devices", "0", "Rows of the timeline")]
    return [
        Figure(
            "lost", share_text(1 - timeline.mean_busy), "Part of the step in which devices do not compute, on average"
        ),
        Figure("step", scale.text(timeline.makespan), "From the first start to the last end, over all devices"),
        Figure("peak", peak_text(panel), "Highest memory of any device"),
        Figure("span", scale.text(timeline.span), "Longest time from first to last pass of one device"),
        Figure("bubble of the slowest device", share_text(timeline.bubble_rate), "Idle part of that span"),
    ]


def exchange_text(panels: Iterable[Panel]) -> str:
    """The share of each kind of pass in which tensor ranks only exchange rows: "tensor collectives: 18.2 % of F"; empty
    if there is none."""
    panels = tuple(panels)
    words = []
    for kind in kinds_in(panels):
        events = [(panel, event) for panel in panels for row in panel.rows for event in row if event.item.kind is kind]
        total = sum(event.end - event.start for _, event in events)
        exchanging = sum(panel.timeline.exchange_of(event) for panel, event in events)
        if total and exchanging:
            words.append(f"{share_text(exchanging / total)} of {kind.value}")
    return f"tensor collectives: {', '.join(words)}" if words else ""


def shades_text(panels: Iterable[Panel]) -> str:
    """What the shades of a colour mean; empty if every kind has only one."""
    panels = tuple(panels)
    meanings = []
    if any(len(stages) > 1 for panel in panels for stages in panel.stages):
        meanings.append("from the first to the last stage of a device")
    if any(panel.slices > 1 for panel in panels):
        meanings.append("from the first to the last slice of a sequence")
    return f"lighter to darker: {', and in each '.join(meanings)}" if meanings else ""


def limit_text(panels: Iterable[Panel]) -> str:
    """The memory limits: "memory limit: 6 in flight"; empty if there are none."""
    limits = (amount_text(panel, limit) for panel in panels for limit in sorted(set(panel.timeline.limit or ())))
    text = ", ".join(dict.fromkeys(limits))
    return f"memory limit: {text}" if text else ""


def busy_share(panel: Panel, device: int) -> float:
    """The compute time of a device over the makespan."""
    return panel.timeline.busy[device] / panel.timeline.makespan if panel.timeline.makespan else 0.0


def peak_text(panel: Panel) -> str:
    """The highest of the panel's `peaks`, with its unit; with offload, also the activations in flight."""
    text = amount_text(panel, max(panel.peaks, default=0.0))
    if panel.knows_bytes or panel.timeline.on_device is None:
        return text
    return f"{text} of {max(panel.timeline.peak_in_flight, default=0)} in flight"


def peak_of(panel: Panel, device: int) -> str:
    """The highest memory of a device: bytes, or the number of stage activations alone."""
    amount = panel.peaks[device]
    return bytes_text(amount) if panel.knows_bytes else number_text(amount)


def amount_text(panel: Panel, amount: float) -> str:
    """An amount of memory in the unit of `panel`: bytes, or stage activations."""
    return bytes_text(amount) if panel.knows_bytes else f"{number_text(amount)} {panel.held}"


def number_text(value: float) -> str:
    """Four digits, without a power of ten unless it is very small: 12870, 162, 1.25, 0.0125."""
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    if digits > 9:
        return f"{value:.3g}"
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def share_text(value: float) -> str:
    """A share as a percentage: "56.8 %"."""
    return f"{100 * value:.1f} %"


def bytes_text(value: float) -> str:
    """Bytes in powers of 1024: "1.5 GiB"."""
    power = 0
    while abs(value) >= 1024 and power < len(_BYTES) - 1:
        value /= 1024
        power += 1
    return f"{number_text(value)} {_BYTES[power]}"


def ticks(length: float, scale: Scale, number_of_ticks: float) -> list[tuple[float, str]]:
    """(time, text) of about `number_of_ticks` round times from 0 to `length`."""
    step = round_step(length / max(1.0, number_of_ticks), scale.unit_seconds)
    if step <= 0:
        return [(0.0, scale.text(0.0))]
    return [(number * step, scale.text(number * step)) for number in range(int(length / step + 1e-9) + 1)]


def round_step(step: float, unit_seconds: float | None = None) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is at least `step`, in seconds if `unit_seconds` is known; 0 for 0."""
    if step <= 0:
        return 0.0
    unit = unit_seconds or 1.0
    target = step * unit
    power = 1.0
    while power > target:
        power /= 10
    while power * 10 <= target:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= target * (1 - 1e-9)) / unit
