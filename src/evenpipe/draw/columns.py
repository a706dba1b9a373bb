"""A row of events cut into equal columns, for the terminal, and for passes narrower than a pixel in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenpipe.schedule import Event

from .kinds import channels, text_of
from .panel import Panel


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of an event that lies in a column; start and end from 0 to 1, within the column."""

    event: Event
    start: float
    end: float


def cut(row: Sequence[Event], origin: float, width: float, columns: int) -> list[list[Segment]]:
    """Return the segments of each column of `width` units of time from `origin` on, by start; none has length 0."""
    result: list[list[Segment]] = [[] for _ in range(columns)]
    if width <= 0:
        return result
    for event in row:
        start, end = (event.start - origin) / width, (event.end - origin) / width
        column = max(0, int(start))
        while column < columns and column < end:
            low, high = max(start - column, 0.0), min(end - column, 1.0)
            if high - low > 1e-9:
                result[column].append(Segment(event, low, high))
            column += 1
    return result


def mean_colour(
    panel: Panel, segments: Sequence[Segment], idle: str | None, start: float = 0.0, end: float = 1.0
) -> str | None:
    """The mean colour between two positions in a column, with `idle` mixed in for idle time.

    None if nothing runs there or, without an `idle` colour, if most of the time is idle.
    """
    total = [0.0, 0.0, 0.0]
    covered = 0.0
    for segment in segments:
        overlap = min(segment.end, end) - max(segment.start, start)
        if overlap <= 0:
            continue
        covered += overlap
        colours = panel.colours(segment.event)
        for colour in colours:
            for index, value in enumerate(channels(colour)):
                total[index] += value * overlap / len(colours)
    width = max(end - start, covered)
    if covered <= 0 or (idle is None and covered < width / 2):
        return None
    if idle is not None:
        total = [
            value + idle_value * (width - covered) for value, idle_value in zip(total, channels(idle), strict=True)
        ]
        covered = width
    return text_of(tuple(value / covered for value in total))
