"""Stacked bars, one per device: the parts of its memory, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenpipe.errors import InputError

from .canvas import FAINT, LEGEND_LINE, TEXT, Canvas, Entry, n, text_width
from .figures import bytes_text, round_step

COLOURS = ("#3e70d4", "#98dfc3", "#a3980c", "#54ad8b", "#f8bb2d", "#74249c", "#cc3f16", "#a4abb8", "#444b5c")
"""Colours of terms, in order. Neighbours differ in lightness."""
_HEIGHT, _GAP, _LEFT, _HEADING = 18.0, 4.0, 74.0, 34.0
_MOST_BARS = 64


@dataclass(frozen=True, slots=True)
class Bars:
    """One group of bars: its name, and the bytes of each device by term."""

    name: str
    devices: tuple[Mapping[str, float], ...]

    @property
    def totals(self) -> tuple[float, ...]:
        """Bytes of each device."""
        return tuple(sum(device.values()) for device in self.devices)


def bars_svg(groups: Sequence[Bars], *, title: str = "", width: int = 1000, limit: float | None = None) -> str:
    """Groups of bars below each other on one axis of bytes, as an SVG document.

    limit: memory of a device in bytes, drawn as a line. Raises InputError if there is nothing to draw, or too much.
    """
    _check(groups)
    width = max(300, width)
    canvas, top = Canvas(), 4.0
    terms = _terms(groups)
    right = 12 + max(text_width(bytes_text(total), 11) for group in groups for total in group.totals)
    largest = max([*(total for group in groups for total in group.totals), limit or 0.0]) or 1.0
    scale = (width - _LEFT - right) / largest
    if title:
        canvas.text(12, 22, title, 17, weight="bold")
        top += 30
    body = top
    for group in groups:
        canvas.text(_LEFT, top + 22, group.name, 15, weight="bold")
        words = f"fullest {bytes_text(max(group.totals))}, emptiest {bytes_text(min(group.totals))}"
        canvas.text(_LEFT + text_width(group.name, 16) + 16, top + 22, words, 12, fill=FAINT)
        top += _HEADING
        for device, held in enumerate(group.devices):
            canvas.text(_LEFT - 8, top + 13, f"device {device}", 12, fill=FAINT, anchor="end")
            x = _LEFT
            for term, colour in zip(terms, COLOURS, strict=False):
                size = held.get(term, 0.0) * scale
                if size > 0:
                    canvas.rect(x, top, size, _HEIGHT, colour)
                    x += size
            canvas.text(x + 6, top + 13, bytes_text(group.totals[device]), 11, fill=FAINT)
            top += _HEIGHT + _GAP
    if limit is not None:
        canvas.path(f"M{n(_LEFT + limit * scale)} {n(body)}V{n(top)}", TEXT)
    unit = 1024.0 ** max(0, int(len(f"{int(largest)}") - 1) // 3)
    step = round_step(largest / unit / max(1.0, (width - right - _LEFT) / 90)) * unit
    sizes = [number * step for number in range(int(largest / step + 1e-9) + 1)]
    marks = ((_LEFT + size * scale, bytes_text(size)) for size in sizes)
    canvas.axis(marks, _LEFT, width - right, top + 2)
    entries = list(map(Entry, COLOURS, terms))
    if limit is not None:
        entries.append(Entry(TEXT, f"line: {bytes_text(limit)} of a device"))
    top = canvas.legend(entries, _LEFT, width - 10, top + 32) + LEGEND_LINE + 2
    summary = "; ".join(f"{group.name}: {_figures(group)}" for group in groups)
    return canvas.document(width, top, name=title or "Memory of every device", summary=summary)


def _figures(group: Bars) -> str:
    return ", ".join(f"device {device} {bytes_text(total)}" for device, total in enumerate(group.totals))


def _terms(groups: Sequence[Bars]) -> list[str]:
    """All terms, in the order of their first use."""
    terms = dict.fromkeys(term for group in groups for device in group.devices for term in device)
    return [term for term in terms if any(device.get(term) for group in groups for device in group.devices)]


def _check(groups: Sequence[Bars]) -> None:
    if not any(group.devices for group in groups):
        raise InputError("there is no device to draw")
    if sum(len(group.devices) for group in groups) > _MOST_BARS:
        raise InputError(f"there are more than {_MOST_BARS} devices to draw; draw fewer at a time")
    if len(_terms(groups)) > len(COLOURS):
        raise InputError(f"memory of {len(_terms(groups))} terms cannot be drawn; expected at most {len(COLOURS)}")
