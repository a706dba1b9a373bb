"""Timelines as SVG, for documents: boxes with microbatch numbers, grey for idle time, one time axis.

Only shapes with plain attributes are used, without scripts, so every viewer and converter shows the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from evenpipe.schedule import Event, Item, Kind, Pass, TransferKind
from evenpipe.schedule.passes import SHARDING_KINDS, unit_text
from evenpipe.schedule.sharding import part_of

from .canvas import FAINT, LEGEND_LINE, TEXT, Canvas, Entry, n, text_width
from .columns import cut, mean_colour
from .figures import Scale, exchange_text, figures, limit_text, peak_of, shades_text, ticks
from .kinds import IDLE, STYLES, ink_on
from .panel import Panel, Timelines, kinds_in, lanes, panels_of, parts

_MEMORY = "#8d97a5"
_RIGHT, _HEADING, _AXIS = 14, 34, 30
_SPEEDUP = 40
"""Font size of the speedup."""
_WAIT = 0.3
"""Height of the bar of a wait, relative to a row."""
_THIN = 4.0
"""Height of the bar of a wait in the legend."""
_COPY = 0.4
"""Height of the lanes of passes that overlap with compute, relative to a row."""


def svg(
    timelines: Timelines,
    *,
    title: str = "",
    width: int = 1000,
    memory: bool = False,
    waits: bool = False,
    unit_seconds: float | None = None,
    unit: str = "the unit of the costs",
    speedup: bool = False,
) -> str:
    """Timelines as an SVG document, above each other on one time axis.

    width: in pixels, at least 300. memory: a curve per device under its row, and a line for its limit, if it has one.
    waits: a bar in each idle time, in the colour of the transfer that ended it. unit_seconds: seconds per unit of time,
    if known; unit: otherwise its name. speedup: write the speedup to the right of each step that is shorter than the
    first one. The same timelines always give the same text.
    """
    page = _Page(panels_of(timelines), title, max(300, width), Scale(unit_seconds), memory=memory, waits=waits)
    return page.draw("" if unit_seconds is not None else unit, speedup=speedup)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heights of a device's row, of the lanes and the memory curve below it, and of the gap to the next row."""

    height: float
    lanes: float
    memory: float
    gap: float

    @property
    def pitch(self) -> float:
        return self.height + self.lanes + self.memory + self.gap

    @classmethod
    def of(cls, devices: int, *, has_lanes: bool, memory: bool) -> _Rows:
        height = 24.0 if devices <= 8 else 18.0 if devices <= 16 else 13.0 if devices <= 48 else 600 / devices
        gap = min(4.0, height / 5)
        lane = round(height * _COPY, 1) if has_lanes else 0.0
        return cls(height, lane, round(height * 0.6, 1) if memory else 0.0, gap + (2 if memory or has_lanes else 0))


class _Page:
    def __init__(
        self, panels: tuple[Panel, ...], title: str, width: int, scale: Scale, *, memory: bool, waits: bool
    ) -> None:
        self.panels, self.title, self.width, self.memory, self.scale = panels, title, width, memory, scale
        self.waits = waits
        self.length = max(panel.length for panel in panels)
        max_devices = max(panel.devices for panel in panels)
        self.has_lanes = any(row for panel in panels for row in panel.passes_beside)
        self.rows = _Rows.of(max_devices, has_lanes=self.has_lanes, memory=memory)
        self.left = 12 + text_width(f"device {max(max_devices - 1, 0)}", 12)
        self.right = float(_RIGHT)
        if memory:
            texts = [peak_of(panel, device) for panel in panels for device in range(panel.devices)]
            self.right += max((text_width(text, 10) for text in texts), default=0)
        self.pixels_per_unit = (width - self.left - self.right) / self.length if self.length else 0.0
        self.canvas = Canvas()

    def draw(self, unit: str, *, speedup: bool) -> str:
        top = 34.0 if self.title else 4.0
        if self.title:
            self.canvas.text(12, 22, self.title, 17, weight="bold")
        body = top
        for panel in self.panels:
            bottom = self._panel(panel, top)
            if speedup:
                self._speedup(panel, bottom)
            top = bottom
        top = self._legend(self._axis(body, top, unit))
        name = self.title or " and ".join(panel.name for panel in self.panels if panel.name) or "Timeline"
        summary = "; ".join(self._summary(panel) for panel in self.panels)
        return self.canvas.document(self.width, top, name=name, summary=summary)

    def _summary(self, panel: Panel) -> str:
        words = ", ".join(f"{figure.name} {figure.text}" for figure in figures(panel, self.scale))
        return f"{panel.name}: {words}" if panel.name else words

    def _panel(self, panel: Panel, top: float) -> float:
        """Draw a panel below `top`; return where it ends."""
        words = "  ·  ".join(f"{figure.name} {figure.text}" for figure in figures(panel, self.scale))
        self.canvas.text(self.left, top + 22, panel.name, 15, weight="bold")
        if panel.name and self.left + text_width(panel.name, 16) + text_width(words, 12) + 20 > self.width:
            top += 17
            self.canvas.text(self.left, top + 22, words, 12, fill=FAINT)
        else:
            x = self.left + (text_width(panel.name, 16) + 16 if panel.name else 0)
            self.canvas.text(x, top + 22, words, 12, fill=FAINT)
        top += _HEADING
        if self.memory and panel.devices:
            self.canvas.text(self.width - 6, top - 6, "peak", 10, fill=FAINT, anchor="end")
        every = max(1, -(-11 // max(1, int(self.rows.pitch))))  # if rows are lower than text, only some have a name
        comparable = [candidate for candidate in self.panels if candidate.knows_bytes == panel.knows_bytes]
        highest = max(candidate.highest for candidate in comparable)
        for device in range(panel.devices):
            y = top + device * self.rows.pitch
            if device % every == 0:
                size = min(12.0, max(8.0, self.rows.height))
                middle = y + self.rows.height / 2 + size * 0.36
                self.canvas.text(self.left - 8, middle, f"device {device}", size, fill=FAINT, anchor="end")
            self._row(panel, device, y)
            self._lanes(panel, device, y + self.rows.height)
            if self.memory:
                self._curve(panel, device, y + self.rows.height + self.rows.lanes, highest)
        return top + panel.devices * self.rows.pitch

    def _row(self, panel: Panel, device: int, y: float) -> None:
        row, height = panel.rows[device], self.rows.height
        makespan_width = panel.timeline.makespan * self.pixels_per_unit
        self.canvas.rect(self.left, y, makespan_width, height, IDLE)
        columns = max(1, round(self.length * self.pixels_per_unit))
        long = [event for event in row if event.end > event.start]
        if len(long) > columns / 1.5:  # most are narrower than a pixel or two
            self._mean(panel, device, y, columns)
            return
        if self.waits:
            self._waits(panel, device, y)
        for event in long:
            self._box(panel, event, y)

    def _lanes(self, panel: Panel, device: int, y: float) -> None:
        """Draw the passes that overlap with compute, on as many lanes as run at the same time."""
        events = panel.passes_beside[device]
        chosen = lanes(events)
        height = self.rows.lanes / (max(chosen, default=0) + 1)
        for event, lane in zip(events, chosen, strict=True):
            x, width = self._x(panel, event.start), (event.end - event.start) * self.pixels_per_unit
            edge = 0.4 if width >= 4 else 0.0
            box = (x + edge, y + 1 + lane * height, width - 2 * edge, height - 1)
            colour = STYLES[event.item.kind].colour
            self.canvas.rect(*box, colour)
            self._write(_short(event.item), colour, box)

    def _box(self, panel: Panel, event: Event, y: float) -> None:
        x, width = self._x(panel, event.start), (event.end - event.start) * self.pixels_per_unit
        edge = 0.4 if width >= 4 else 0.0  # half of the light line between neighbours
        colours = panel.colours(event)
        part_height = self.rows.height / len(colours)
        for index, colour in enumerate(colours):
            self.canvas.rect(x + edge, y + index * part_height, width - 2 * edge, part_height, colour)
        for index, (item, colour) in enumerate(zip(parts(event), colours, strict=False)):
            named = len(panel.stages[event.device]) > 1 and text_width(str(item), 11) + 5 <= width
            text = str(item) if named else unit_text(item)  # the shade says which stage it is
            self._write(text, colour, (x, y + index * part_height, width, part_height))

    def _write(self, text: str, colour: str, box: tuple[float, float, float, float]) -> None:
        """Write `text` in the middle of a box (x, y, width, height), if it is readable there."""
        x, y, width, height = box
        size = min(11.0, height - 2, 11 * (width - 1) / (text_width(text, 11) or 1))
        if size >= 8:
            middle = y + height / 2 + size * 0.36
            self.canvas.text(x + width / 2, middle, text, size, fill=ink_on(colour), anchor="middle")

    def _waits(self, panel: Panel, device: int, y: float) -> None:
        """Draw a slim bar from the start of idle time to the arrival of the awaited item."""
        height = self.rows.height
        for wait in panel.waits(device):
            x, width = self._x(panel, wait.start), (wait.end - wait.start) * self.pixels_per_unit
            self.canvas.rect(x, y + height * (1 - _WAIT) / 2, width, height * _WAIT, STYLES[wait.item.kind].colour)

    def _mean(self, panel: Panel, device: int, y: float, columns: int) -> None:
        """Draw one rectangle per run of pixels of one colour: the row as seen from far away."""
        step = self.length / columns
        colours = [
            mean_colour(panel, segments, IDLE) for segments in cut(panel.rows[device], panel.origin, step, columns)
        ]
        start = 0
        for column in range(1, columns + 1):
            if column == columns or colours[column] != colours[start]:
                colour = colours[start]
                if colour is not None:
                    self.canvas.rect(self.left + start, y, column - start, self.rows.height, colour)
                start = column

    def _curve(self, panel: Panel, device: int, y: float, highest: float) -> None:
        """Draw memory as an area, with its baseline at the lower end and its peak at the right."""
        base, height = y + self.rows.memory, self.rows.memory - 1
        if panel.timeline.limit is not None:
            at, right = base - height * panel.timeline.limit[device] / highest, self.width - self.right
            self.canvas.path(f"M{n(self.left)} {n(at)}H{n(right)}", TEXT)
        curve = panel.curve(device)
        if not curve or highest <= 0:
            return
        x = self._x(panel, curve[0][0])
        path = [f"M{n(x)} {n(base)}"]
        drawn, top = x, 0.0
        for time, value in curve:
            x = self._x(panel, time)
            if x - drawn < 0.4 and len(path) > 1 and value <= top:
                continue  # within a pixel, the highest value counts
            path.append(f"H{n(x)}V{n(base - height * value / highest)}")
            drawn, top = x, value
        path.append(f"H{n(max(x, self._x(panel, curve[-1][0])))}V{n(base)}Z")
        self.canvas.area("".join(path), _MEMORY, 0.55)
        self.canvas.text(self.width - 6, base, peak_of(panel, device), 10, fill=FAINT, anchor="end")

    def _speedup(self, panel: Panel, bottom: float) -> None:
        """Write the speedup over the first panel, in the middle of the free space to the right of the rows."""
        first, makespan = self.panels[0].timeline.makespan, panel.timeline.makespan
        text = f"{first / makespan:.1f}x" if makespan else ""
        left, right = self.left + makespan * self.pixels_per_unit, self.width - self.right
        if text not in ("", "1.0x") and right - left > 1.5 * text_width(text, _SPEEDUP):
            middle = bottom - panel.devices * self.rows.pitch / 2
            self.canvas.text((left + right) / 2, middle, text, _SPEEDUP, anchor="middle", weight="bold")
            self.canvas.text((left + right) / 2, middle + 18, "as fast", 12, fill=FAINT, anchor="middle")

    def _axis(self, top: float, bottom: float, unit: str) -> float:
        bottom += 2
        times = ticks(self.length, self.scale, (self.width - self.left - self.right) / 90)
        marks = ((self.left + time * self.pixels_per_unit, text) for time, text in times)
        self.canvas.axis(marks, self.left, self.width - self.right, bottom)
        if unit:
            self.canvas.text(self.width - self.right, bottom + 34, f"time, in {unit}", 11, fill=FAINT, anchor="end")
        return bottom + _AXIS + (14 if unit else 0)

    def _legend(self, top: float) -> float:
        overlapped = {event.item.kind for panel in self.panels for row in panel.passes_beside for event in row}
        entries = _entries(kinds_in(self.panels)) + _entries(overlapped)
        entries.append(Entry(IDLE, "idle"))
        if self.waits:
            awaited = _entries([kind for panel in self.panels for kind in panel.awaited])
            entries += [Entry(entry.colour, f"waits for {entry.text}", _THIN) for entry in awaited]
        if self.memory and (limit := limit_text(self.panels)):
            entries.append(Entry(TEXT, limit, 1))
        top = self.canvas.legend(entries, self.left, self.width - 10, top)
        for text in filter(None, (shades_text(self.panels), exchange_text(self.panels))):
            top += LEGEND_LINE
            self.canvas.text(self.left, top + 10.5, text, 12)
        return top + LEGEND_LINE + 2

    def _x(self, panel: Panel, time: float) -> float:
        return self.left + (time - panel.origin) * self.pixels_per_unit


def _entries(kinds: Collection[Kind | TransferKind]) -> list[Entry]:
    """Colour and text of each style in a legend; kinds that look alike share the entry of the first one."""
    first = {style: kind for kind, style in reversed(STYLES.items()) if kind in kinds}
    return [Entry(style.colour, f"{kind.value}  {style.words}") for style, kind in reversed(first.items())]


def _short(item: Item) -> str:
    """The unit of a copy, or the part of the model that a collective over replicas is for."""
    if isinstance(item, Pass) and item.kind in SHARDING_KINDS:
        return str(part_of(item))
    return unit_text(item)
