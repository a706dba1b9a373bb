"""A timeline as text: one line per device, in colour if the terminal supports it, else with letters.

In colour a pass is a block that contains its microbatch; its edges are drawn to an eighth of a character. Passes
narrower than a character are shown by their mean colour. Without colour a pass starts with the letter of its kind,
followed by its microbatch if there is room and by dashes up to its end; a dot is idle time. If most names would not
fit, time continues below, in as many bands as needed, up to `MAX_LINES`.

If a device has several stages, names include the stage: with two stages, F3 is of the first and f3 of the second; with
more, F4/3 is of stage 4. Every name begins with its letter, so short neighbouring passes can be told apart.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from itertools import groupby
from math import ceil
from statistics import median

from evenpipe.schedule import Event, Kind, Pass, TransferKind
from evenpipe.schedule.passes import FREEING_KINDS, GATHERING_KINDS, REDUCING_KINDS, unit_text
from evenpipe.words import unknown

from .ansi import DEPTHS, Painter
from .columns import Segment, cut, mean_colour
from .figures import Scale, busy_share, exchange_text, figures, peak_of, shades_text, ticks
from .kinds import STYLES, ink_on, mix
from .panel import Panel, Timelines, kinds_in, panels_of, parts

SMALLEST_WIDTH = 40
MAX_LINES = 128
"""Maximum number of lines in a picture without colour, if a device takes several."""
_SCREEN = 48
"""The same if vocabulary passes, which are often much shorter than others, must have room too."""
_LETTER: dict[Kind | TransferKind, str] = {
    Kind.OVERLAP_F_B: "&",
    **dict.fromkeys(GATHERING_KINDS, "u"),
    **dict.fromkeys(FREEING_KINDS, "x"),
    **dict.fromkeys(REDUCING_KINDS, "g"),
}
_COUNTED = (Kind.F, Kind.B, Kind.I, Kind.W)
"""Kinds whose names must fit in a picture without colour."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_IDLE = "#8a9099"


def terminal(
    timelines: Timelines,
    *,
    width: int | None = None,
    colour: str | None = None,
    memory: bool = False,
    waits: bool = False,
    unit_seconds: float | None = None,
    overview: bool = False,
) -> str:
    """Timelines as text that ends with a newline, several above each other on one time axis.

    width: characters per line, that of the terminal by default, at least 40.
    colour: "none", "256" or "truecolor"; by default what the standard output can show.
    memory: a second line per device with its memory over time.
    waits: a line per device with its waiting times by cause, and with colour, dots in the colour of the awaited item.
    unit_seconds: seconds per unit of time, if known.
    overview: one line per device also without colour, however narrow the passes are.
    Raises InputError for an unknown `colour`.
    """
    panels = panels_of(timelines)
    colour = depth_of_output() if colour is None else colour
    if colour not in DEPTHS:
        raise unknown("colour", colour, DEPTHS)
    width = max(SMALLEST_WIDTH, shutil.get_terminal_size().columns if width is None else width)
    page = _Page(panels, Painter(colour), width, Scale(unit_seconds), waits=waits, overview=overview)
    return "\n".join(page.lines(memory)) + "\n"


def depth_of_output() -> str:
    """What the standard output can show: "none" if it is not a terminal or NO_COLOR is set (no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return "none"
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "none"
    return "truecolor" if os.environ.get("COLORTERM") in ("truecolor", "24bit") else "256"


class _Page:
    """All panels at the same width: columns for names, for the timeline and for the busy share of each device."""

    def __init__(
        self, panels: tuple[Panel, ...], painter: Painter, width: int, scale: Scale, *, waits: bool, overview: bool
    ) -> None:
        self.panels, self.painter, self.width, self.scale, self.waits = panels, painter, width, scale, waits
        max_devices = max(panel.devices for panel in panels)
        self.left = len(f"device {max(max_devices - 1, 0)}") + 1
        self.right = max([6, *(1 + len(peak_of(panel, device)) for panel in panels for device in range(panel.devices))])
        self.columns = width - self.left - self.right
        self.length = max(panel.length for panel in panels)
        self.bands = 1 if overview or painter.colourful else self._band_count()

    def lines(self, memory: bool) -> list[str]:
        lines: list[str] = []
        for panel in self.panels:
            lines += self._heading(panel)
            highest = max(panel.peaks, default=0.0)
            rows = [self._device(panel, device, highest if memory else None) for device in range(panel.devices)]
            for band in range(self.bands):
                lines += [row[band] for device in rows for row in device]
                lines += self._axis(band) if self.bands > 1 else []
            if self.waits:
                lines += self._waited(panel)
            lines.append("")
        return [*lines[:-1], *(self._axis(0) if self.bands == 1 else []), *self._legend()]

    @property
    def _step(self) -> float:
        return self.length / (self.columns * self.bands)

    def _band_count(self) -> int:
        """The number of bands in which the names of all kinds of pass fit, or at least those of stage passes; 1 if it
        would be too high."""
        durations: defaultdict[Kind | TransferKind, list[float]] = defaultdict(list)
        longest: defaultdict[Kind | TransferKind, int] = defaultdict(int)
        for panel in self.panels:
            for event in (event for row in panel.rows for event in row if event.end > event.start):
                kind = event.item.kind
                durations[kind].append(event.end - event.start)
                longest[kind] = max(longest[kind], len(_name(panel, event)))
        rate = {kind: longest[kind] / median(times) for kind, times in durations.items()}  # characters per unit of time
        devices = sum(panel.devices for panel in self.panels)
        for kinds, max_lines in ((rate, _SCREEN), (rate.keys() & _COUNTED, MAX_LINES)):
            bands = ceil(self.length * max((rate[kind] for kind in kinds), default=0.0) / self.columns - 1e-9)
            if 0 < bands * devices <= max_lines:
                return bands
        return 1

    def _device(self, panel: Panel, device: int, highest: float | None) -> list[list[str]]:
        """The line of a device, and the line of its memory if `highest` is given, each divided into bands."""
        cells = cut(panel.rows[device], panel.origin, self._step, self.columns * self.bands)
        busy = f"{100 * busy_share(panel, device):.0f} %".rjust(self.right)
        name = self.painter.faint(f"device {device}".ljust(self.left))
        if self.painter.colourful:
            bodies = [self._coloured(panel, cells, self._dots(panel, device) if self.waits else {})]
        else:
            bodies = self._in_bands(_lettered(panel, cells))
        lines = [[(name + body + self.painter.faint(busy)).rstrip() for body in bodies]]
        return lines if highest is None else [*lines, self._memory(panel, device, highest)]

    def _in_bands(self, text: str) -> list[str]:
        return [text[band * self.columns :][: self.columns] for band in range(self.bands)]

    def _heading(self, panel: Panel) -> list[str]:
        words = [f"{figure.name} {figure.text}" for figure in figures(panel, self.scale)]
        lines = _wrapped(words, ", ", self.width)
        return [self.painter.bold(panel.name), *lines] if panel.name else lines

    def _dots(self, panel: Panel, device: int) -> dict[int, str]:
        """Return, per column, the colour of the item that a device waits for."""
        if not self._step:
            return {}
        colours = {}
        for wait in panel.waits(device):
            first, last = ((time - panel.origin) / self._step for time in (wait.start, wait.end))
            colours.update(dict.fromkeys(range(int(first), int(last) + 1), STYLES[wait.item.kind].colour))
        return colours

    def _waited(self, panel: Panel) -> list[str]:
        """Return, per device, its waiting times by cause, the longest first."""
        lines = []
        for device in range(panel.devices):
            sums: dict[str, float] = {}
            for wait in panel.waits(device):
                sums[wait.item.kind.value] = sums.get(wait.item.kind.value, 0.0) + wait.end - wait.start
            words = [f"{name} {self.scale.text(time)}" for name, time in sorted(sums.items(), key=lambda e: -e[1])]
            lines += _wrapped([f"device {device} waited for", *(words or ["nothing"])], "  ", self.width)
        return lines

    def _coloured(self, panel: Panel, cells: list[list[Segment]], dots: dict[int, str]) -> str:
        labels = _labels(panel, cells, self._step)
        body = (
            self._cell(panel, segments, labels.get(column, ("", 0)), dots.get(column, _IDLE))
            for column, segments in enumerate(cells)
        )
        return "".join(body) + self.painter.reset

    def _cell(self, panel: Panel, segments: list[Segment], label: tuple[str, int], dot: str) -> str:
        """A column. label: a character, and the index of the part of a joint pass that it belongs to."""
        paint = self.painter.cell
        if not segments:
            return paint("·", dot, None)
        first, last = segments[0], segments[-1]
        if len(segments) == 1 and first.end - first.start > 0.94:
            colours = _striped(panel, first)
            text, index = label
            if len(colours) > 1 and not text:
                return paint("▀", colours[0], colours[1])
            return paint(text or " ", ink_on(colours[index]), colours[index])
        if len(segments) == 1:
            colour = _striped(panel, first)[0]
            if first.start < 0.06:
                return paint(_eighth(first.end), colour, None)
            if first.end > 0.94:
                return paint(_eighth(first.start), None, colour)
        if len(segments) == 2 and last.start - first.end < 0.06 and first.start < 0.06 and last.end > 0.94:
            return paint(_eighth(first.end), _striped(panel, first)[0], _striped(panel, last)[0])
        left, right = (mean_colour(panel, segments, None, low, low + 0.5) for low in (0.0, 0.5))
        return paint("▌" if left or right else "·", left if left or right else dot, right)

    def _memory(self, panel: Panel, device: int, highest: float) -> list[str]:
        values = _highest_per_column(panel, device, self._step, self.columns * self.bands)
        heights = _HEIGHTS if self.painter.colourful else " .:-=+*%#"
        text = "".join(heights[round(8 * value / highest) if highest else 0] for value in values)
        peak = peak_of(panel, device).rjust(self.right)
        return [(" " * self.left + self.painter.faint(band + peak)).rstrip() for band in self._in_bands(text)]

    def _axis(self, band: int) -> list[str]:
        marks = [" "] * self.width
        for time, text in ticks(self.length, self.scale, self.columns * self.bands / 12):
            column = self.left + (round(time / self._step) if time else 0) - band * self.columns
            if (
                column >= self.left
                and column + len(text) <= self.width
                and all(mark == " " for mark in marks[max(0, column - 1) : column])
            ):
                marks[column : column + len(text)] = text
        return [self.painter.faint("".join(marks).rstrip())]

    def _legend(self) -> list[str]:
        entries = []
        kinds = list(kinds_in(self.panels))
        events = (event for panel in self.panels for row in panel.rows for event in row)
        if not self.painter.colourful and any(event.item.kind is Kind.OVERLAP_F_B for event in events):
            kinds.append(Kind.OVERLAP_F_B)  # in colour, its parts are visible
        for kind in kinds:
            style = STYLES[kind]
            sample = _LETTER.get(kind, kind.value)
            chip = self.painter.cell(f" {sample} ", ink_on(style.colour), style.colour) + self.painter.reset
            entries.append(f"{chip if self.painter.colourful else sample} {style.words}")
        held = {len(stages) for panel in self.panels for stages in panel.stages}
        if 2 in held:
            entries.append("lower case: second stage of a device")
        if max(held, default=0) > 2:
            entries.append("F4/3: stage 4, microbatch 3")
        notes = (shades_text(self.panels) if self.painter.colourful else "", exchange_text(self.panels))
        lines = _wrapped(entries, "  ", self.width)
        return lines + [line for text in notes if text for line in _wrapped(text.split(", "), ", ", self.width)]


def _name(panel: Panel, event: Event) -> str:
    """The name of a pass: F3, f3 or F4/3, and F3&b2 for a joint pass."""
    return "&".join(f"{_letter(panel, event.device, component)}{unit_text(component)}" for component in parts(event))


def _letter(panel: Panel, device: int, component: Pass) -> str:
    """The kind of a pass, and its stage if the device has several."""
    letter, stages = _LETTER.get(component.kind, component.kind.value), panel.stages[device]
    if len(stages) > 2 and component.stage is not None:
        return f"{letter}{component.stage}/"
    return letter.lower() if component.stage in stages[1:] else letter


def _labels(panel: Panel, cells: list[list[Segment]], step: float) -> dict[int, tuple[str, int]]:
    """Per column, one character of the name or unit of the pass that fills it, and the index of the part of a joint
    pass that the character belongs to. A name is used only if it fits into the columns that the pass fills.

    Passes shorter than a column and a half get no label, because whether they fill a column depends on where they
    start.
    """
    labels: dict[int, tuple[str, int]] = {}
    column = 0
    while column < len(cells):
        end = column
        event = cells[column][0].event if _full(cells[column]) else None
        while event is not None and end < len(cells) and _full(cells[end]) and cells[end][0].event is event:
            end += 1
        if event is not None and event.end - event.start >= 1.5 * step:
            unit_name = "&".join(map(unit_text, parts(event)))  # the colour says the rest
            texts = [_name(panel, event), unit_name] if len(panel.stages[event.device]) > 1 else [unit_name]
            text = next((text for text in texts if len(text) <= end - column), "")
            start = column + (end - column - len(text)) // 2
            labels.update({start + offset: (letter, text[:offset].count("&")) for offset, letter in enumerate(text)})
        column = max(end, column + 1)
    return labels


def _full(segments: list[Segment]) -> bool:
    return len(segments) == 1 and segments[0].end - segments[0].start > 0.94


def _striped(panel: Panel, segment: Segment) -> tuple[str, ...]:
    """The colours of a pass; odd units are slightly darker, to tell neighbours of the same kind apart."""
    colours = panel.colours(segment.event)
    odd = ((segment.event.item.microbatch or 0) + segment.event.item.slice) % 2
    return tuple(mix(colour, "#000000", 0.12) for colour in colours) if odd else colours


def _eighth(position: float) -> str:
    return _EIGHTHS[min(8, max(0, round(8 * position)))]


def _lettered(panel: Panel, cells: list[list[Segment]]) -> str:
    """One character per column: of the event with the largest share, or a dot if most of the column is idle."""
    text = []
    for event, columns in groupby(map(_largest, cells)):
        room = len(list(columns))
        if event is None:
            text.append("." * room)
            continue
        word = _name(panel, event)
        letter = "&" if "&" in word else word[0]
        text.append((word if len(word) <= room else letter).ljust(room, "-"))
    return "".join(text)


def _largest(segments: list[Segment]) -> Event | None:
    if sum(segment.end - segment.start for segment in segments) < 0.5:
        return None
    return max(segments, key=lambda segment: segment.end - segment.start).event


def _highest_per_column(panel: Panel, device: int, step: float, columns: int) -> list[float]:
    """The highest memory of a device in each column; 0 after its last event."""
    values = [0.0] * columns
    held, column = 0.0, 0
    if step <= 0:
        return values
    for time, value in panel.curve(device):
        position = (time - panel.origin) / step + 1e-9  # an edge that rounding puts just before a column belongs to it
        end = min(columns - 1, max(0, int(position)))
        while column < end:
            values[column] = max(values[column], held)
            column += 1
        values[end] = max(values[end], value, held if position - end > 2e-9 else 0.0)
        held = value
    last = (panel.rows[device][-1].end - panel.origin) / step if panel.rows[device] else 0
    while column < min(columns, last):
        values[column] = max(values[column], held)
        column += 1
    return values


def _wrapped(words: list[str], joint: str, width: int) -> list[str]:
    lines: list[str] = []
    room = 0
    for word in words:
        size = Painter.visible_length(word)
        if lines and size + len(joint) <= room:
            lines[-1] += joint + word
            room -= size + len(joint)
        else:
            lines.append(word)
            room = width - size
    return lines
