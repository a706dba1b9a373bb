"""A panel as compact JSON for the page: one table of integers, its columns compressed together, in base64.

Times become ticks, integer multiples of a power of ten that is small compared to the makespan, so decimal costs stay
exact. Every column has one 32-bit integer per event; a steadily growing column holds differences. The bytes of a column
are grouped by significance, which compresses better: a regular schedule takes about two bytes per event.
"""

from __future__ import annotations

import base64
import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from evenpipe.schedule import Event, Item, Kind, Slack, Transfer, TransferKind

from .figures import Scale, figures
from .panel import Panel, lanes

RESOURCES = ("", "start", "device", "transfer", "communicator", "link", "engine")
"""Resources that an event can wait for; the index is the number, and 0 means unknown. Others are added on first use."""

COMPUTE, TRANSFERS, BESIDE = range(3)
"""Types of rows of events; `BESIDE`: copies to the host and back, and collectives over replicas."""

_LARGEST = 2**30
EventNumbers = dict[tuple[int | None, Item | None], int]
"""Numbers of events by device and item."""


class StyleTable:
    """The kinds and colours in use, numbered by first use, in one table for all panels of a page."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Kind | TransferKind, tuple[str, ...]], int] = {}
        self.resources = {name: number for number, name in enumerate(RESOURCES)}

    def of(self, panel: Panel, event: Event) -> int:
        """The number of an event's kind and colours."""
        return self.entries.setdefault((event.item.kind, panel.colours(event)), len(self.entries))

    def resource(self, name: str) -> int:
        """The number of the resource that an event waited for."""
        return self.resources.setdefault(name, len(self.resources))


def encode(panel: Panel, styles: StyleTable, scale: Scale) -> dict[str, Any]:
    """A panel as JSON.

    rows: (device, type, number of its first event) of each row; events of a row do not overlap and are sorted by start.
    texts: by number of event, the text of anything other than a plain pass. unknown: by number of event, the text of a
    cause that is not in the picture.
    """
    rows, events = _rows(panel)
    step = tick(panel.length)
    table, texts, unknown = _table(panel, events, styles, step)
    curves = _curves(panel, step)
    return {
        "name": panel.name,
        "devices": panel.devices,
        "step": step,
        "length": panel.length,
        "count": len(events),
        "rows": rows,
        "columns": pack(table),
        "texts": texts,
        "unknown": unknown,
        "bytes": panel.knows_bytes,
        "held": panel.held,
        "curves": curves,
        "highest": panel.highest,
        "limit": panel.timeline.limit,
        "figures": [(figure.name, figure.text) for figure in figures(panel, scale)],
    }


def tick(length: float) -> float:
    """A power of ten, small compared to `length`, for which ticks fit into 31 bits."""
    return 10.0 ** math.ceil(math.log10(length / _LARGEST)) if length > 0 else 1.0


def pack(columns: Sequence[array[int]]) -> str:
    """Columns of 32-bit integers of equal length as base64 text."""
    return base64.b64encode(zlib.compress(b"".join(_planes(column) for column in columns), 6)).decode("ascii")


def _planes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array("i", column)
        column.byteswap()
    raw = column.tobytes()
    return b"".join(raw[byte::4] for byte in range(4))


def _rows(panel: Panel) -> tuple[list[tuple[int, int, int]], list[Event]]:
    """Rows of events that do not overlap: one for compute, and as many as needed for events that run beside it."""
    rows: list[tuple[int, int, int]] = []
    events: list[Event] = []
    for device in range(panel.devices):
        rows.append((device, COMPUTE, len(events)))
        events += panel.rows[device]
    for shows in (TRANSFERS, BESIDE):
        for device in range(panel.devices):
            row = [
                event for event in panel.concurrent[device] if isinstance(event.item, Transfer) == (shows == TRANSFERS)
            ]
            chosen = lanes(row)
            for lane in range(max(chosen, default=-1) + 1):
                rows.append((device, shows, len(events)))
                events += [event for event, number in zip(row, chosen, strict=True) if number == lane]
    return rows, events


def _table(
    panel: Panel, events: list[Event], styles: StyleTable, step: float
) -> tuple[list[array[int]], dict[int, str], dict[int, str]]:
    """Columns: start and duration (ticks), style, stage and microbatch (-1: None), slice, cause (how many events before
    this one; 0: None), resource, ticks in which tensor ranks only exchange rows, slack (ticks; -1 if not known), and
    the first pass to wait (encoded like the cause)."""
    origin = panel.origin
    starts = array("i", [round((event.start - origin) / step) for event in events])
    ends = [round((event.end - origin) / step) for event in events]
    items = [event.item for event in events]
    texts = {
        number: str(item)
        for number, item in enumerate(items)
        if item.kind is Kind.OVERLAP_F_B or (isinstance(item, Transfer) and item.peer is not None)
    }
    event_numbers: EventNumbers = {}
    for number, event in enumerate(events):
        event_numbers.setdefault((event.device, event.item), number)
    causes, resources, unknown = _causes(events, styles, event_numbers)
    table = [
        _differences(starts),
        array("i", [end - start for start, end in zip(starts, ends, strict=True)]),
        array("i", [styles.of(panel, event) for event in events]),
        array("i", [-1 if item.stage is None else item.stage for item in items]),
        _differences(array("i", [-1 if item.microbatch is None else item.microbatch for item in items])),
        array("i", [item.slice for item in items]),
        causes,
        resources,
        array("i", [round(panel.timeline.exchange_of(event) / step) for event in events]),
        array("i", [-1 if event.slack is None else max(0, round(event.slack.time / step)) for event in events]),
        array("i", [_back(number, event.slack, event_numbers) for number, event in enumerate(events)]),
    ]
    return table, texts, unknown


def _back(number: int, slack: Slack | None, event_numbers: EventNumbers) -> int:
    """The offset from this event back to the first pass that waits for it; 0 for the end of the step."""
    waiting_number = None if slack is None else event_numbers.get((slack.device, slack.item))
    return 0 if waiting_number is None else number - waiting_number


def _causes(
    events: list[Event], styles: StyleTable, event_numbers: EventNumbers
) -> tuple[array[int], array[int], dict[int, str]]:
    causes, resources = array("i", bytes(4 * len(events))), array("i", bytes(4 * len(events)))
    unknown: dict[int, str] = {}
    for number, event in enumerate(events):
        cause = event.cause
        if cause is None:
            continue
        resources[number] = styles.resource(cause.resource)
        if cause.item is None:
            continue
        cause_device = event.device if cause.device is None else cause.device
        cause_number = event_numbers.get((cause_device, cause.item))
        if cause_number is None or cause_number == number:
            unknown[number] = f"{cause.item}" if cause.device is None else f"{cause.item} on device {cause_device}"
        else:
            causes[number] = number - cause_number
    return causes, resources, unknown


def _curves(panel: Panel, step: float) -> dict[str, Any]:
    """The memory of all devices as one table: times in ticks, values in units of `unit`."""
    curves = [panel.curve(device) for device in range(panel.devices)]
    peak = max((value for curve in curves for _, value in curve), default=0.0)
    unit = max(1.0, peak / _LARGEST)
    firsts, times, values = [0], array("i"), array("i")
    for curve in curves:
        times.extend(round((time - panel.origin) / step) for time, _ in curve)
        values.extend(round(value / unit) for _, value in curve)
        firsts.append(len(times))
    columns = pack([_differences(times), _differences(values)])
    return {"firsts": firsts, "unit": unit, "columns": columns, "peaks": panel.peaks}


def _differences(column: array[int]) -> array[int]:
    """The difference of each number to the previous one."""
    return array("i", [value - previous for value, previous in zip(column, chain((0,), column), strict=False)])
